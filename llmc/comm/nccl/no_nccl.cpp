// nccl_communicator.h in a program that was built without NCCL.
#include "llmc/comm/nccl/nccl_communicator.h"
#include "llmc/core/error.h"

namespace llmc {

std::unique_ptr<Communicator> make_nccl_communicator(HostCommunicator& host, Queues&, bool) {
    user_error(
        "{} processes on GPUs talk by NCCL, and this program was built without it (nccl.h was not there): "
        "install NCCL and build again, or start one process",
        host.size());
}

}  // namespace llmc
