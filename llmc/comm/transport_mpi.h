// Messages over MPI. `make MPI=0` links transport_no_mpi.cpp in the place of transport_mpi.cpp.
#pragma once

#include <memory>

#include "llmc/comm/transport.h"

namespace llmc {

// Whether this program was built with MPI.
bool has_mpi();

// Joins the job that mpirun, or what else speaks PMI, has started this process in. A process can do so once.
// Without MPI a UserError.
std::unique_ptr<Transport> join_mpi_job();

}  // namespace llmc
