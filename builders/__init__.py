"""The model builder: Hugging Face checkpoint -> rank checkpoint -> network with plugin nodes -> engine."""
