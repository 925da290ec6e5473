// The communicator for GPU data: NCCL's collectives, queued on the device's selected stream. This header is
// plain C++: the program includes it also when built without NCCL (no_nccl.cpp then implements it).
//
// NCCL chooses the order of its sums, which is the same each time for the same sizes and machines. Sums of
// fp32 are in fp32; sums of bf16 are rounded at every hop.
#pragma once

#include <memory>

#include "llmc/comm/communicator.h"
#include "llmc/comm/host_communicator.h"
#include "llmc/device/device.h"

namespace llmc {

// Makes the communicator of all ranks of the job. Each rank has its own GPU, unless `shares_gpu`; `streams`
// are its streams on a CUDA device. All ranks call it. `host` and `streams` must outlive the result.
// UserError if the program was built without NCCL.
//
// The watchdog of `host`, with its time limit, covers this communicator and all that are split from it. If
// NCCL reports an error, or a peer is dead or stuck, the watchdog ends the job.
//   shares_gpu: several ranks may share a GPU, which needs slow NCCL settings; for tests
std::unique_ptr<Communicator> make_nccl_communicator(HostCommunicator& host, Streams& streams,
                                                     bool shares_gpu);

}  // namespace llmc
