// Implements nccl_communicator.h for a build without NCCL.
#include "llmc/comm/nccl/nccl_communicator.h"
#include "llmc/core/error.h"

namespace llmc {

std::unique_ptr<Communicator> make_nccl_communicator(HostCommunicator& host, Streams&, bool) {
    user_error(
        "{} processes on GPUs need NCCL, but this program was built without it (nccl.h was not found); "
        "install NCCL and build again, or start one process",
        host.size());
}

}  // namespace llmc
