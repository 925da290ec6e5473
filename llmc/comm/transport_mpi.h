// Messages over MPI. `make MPI=0` links transport_no_mpi.cpp instead of transport_mpi.cpp.
#pragma once

#include <memory>

#include "llmc/comm/transport.h"

namespace llmc {

// Whether this program was built with MPI.
bool has_mpi();

// Joins the job in which mpirun, or another PMI launcher, started this process. A process can do so once.
// UserError in a build without MPI.
std::unique_ptr<Transport> join_mpi_job();

}  // namespace llmc
