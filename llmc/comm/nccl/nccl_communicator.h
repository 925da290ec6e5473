// The communicator of the GPUs' data: NCCL's collectives, queued on the device's selected queue. Plain C++: the program
// asks here, whether it was built with NCCL or not (no_nccl.cpp answers where it was not).
//
// NCCL adds in an order of its own, the same each time for the same sizes and machines: sums of fp32 are in fp32; those
// of bf16 are rounded at every hop.
#pragma once

#include <memory>

#include "llmc/comm/communicator.h"
#include "llmc/device/queues.h"

namespace llmc {

// The ranks of `host`, each with a GPU of its own, whose queues (a CUDA device's) these are. `timeout`: seconds without
// progress after which a wait for the GPU ends the job. All ranks call it. Both arguments outlive the result.
// UserError if the program was built without NCCL, or if NCCL refuses.
//   shares_gpu: ranks may have one GPU, which NCCL is made to bear by ways that are slow, and for tests
std::unique_ptr<Communicator> make_nccl_communicator(Communicator& host, Queues& queues, double timeout,
                                                     bool shares_gpu);

}  // namespace llmc
