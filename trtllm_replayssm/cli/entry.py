"""Where the console script begins: it imports nothing that takes time outside of its guard."""


def main() -> int:
    """Run the command of this process's arguments; an interruption while it is imported is one line as well."""
    try:
        from trtllm_replayssm.cli.main import main as run

        return run()
    except KeyboardInterrupt:
        import sys

        print("error: interrupted", file=sys.stderr)
        return 130
