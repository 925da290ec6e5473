// Replaces transport_mpi.cpp in a build without MPI.

#include "llmc/comm/transport.h"
#include "llmc/core/error.h"

namespace llmc {

bool has_mpi() { return false; }

std::unique_ptr<Transport> join_mpi_job() {
    user_error(
        "mpirun or another launcher with PMI started this process, but this program was built without MPI "
        "(make MPI=0); start it with --processes N, set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, or "
        "build it with make");
}

}  // namespace llmc
