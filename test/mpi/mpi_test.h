// For the tests in test/mpi: GoogleTests that every rank runs, over MPI or TCP with any number of ranks. Only
// rank 0 reports. A test fails if it fails on any rank. A test may leave no message in flight.
#pragma once

#include "llmc/comm/host_communicator.h"
#include "llmc/comm/transport.h"

namespace llmc::test {

// All ranks of the job.
HostCommunicator& world();
Transport& transport();

}  // namespace llmc::test
