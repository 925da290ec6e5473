// LLMC_HOST_DEVICE marks functions of headers without CUDA that run in kernels, too.
#pragma once

#ifdef __CUDACC__
#define LLMC_HOST_DEVICE __host__ __device__
#else
#define LLMC_HOST_DEVICE
#endif
