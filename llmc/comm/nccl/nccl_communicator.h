// The communicator of the GPUs' data: NCCL's collectives, queued on the device's selected queue. Plain C++: the program
// asks here, whether it was built with NCCL or not (no_nccl.cpp answers where it was not).
//
// NCCL adds in an order of its own, the same each time for the same sizes and machines: sums of fp32 are in fp32; those
// of bf16 are rounded at every hop.
#pragma once

#include <memory>

#include "llmc/comm/communicator.h"
#include "llmc/comm/host_communicator.h"
#include "llmc/device/queues.h"

namespace llmc {

// All ranks of the job, `host`, each with a GPU of its own, whose queues (a CUDA device's) these are. All ranks call it.
// Both arguments outlive the result. UserError if the program was built without NCCL.
// The watchdog of `host`, with its time limit, watches this communicator and all that come from it by split, together:
// where NCCL refuses or a peer is dead or stuck, it ends the job.
//   shares_gpu: ranks may have one GPU, which NCCL is made to bear by ways that are slow, and for tests
std::unique_ptr<Communicator> make_nccl_communicator(HostCommunicator& host, Queues& queues, bool shares_gpu);

}  // namespace llmc
