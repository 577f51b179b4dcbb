// Stands in for the CUDA toolkit's header of this name where no toolkit is installed: TensorRT's headers include it
// for these two handle types alone. It is searched last (-idirafter), so a toolkit's own header wins.
#pragma once

typedef struct CUstream_st* cudaStream_t;
typedef struct CUevent_st* cudaEvent_t;
