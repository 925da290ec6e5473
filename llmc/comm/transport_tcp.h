// Messages over TCP, between processes that find each other without MPI (rendezvous.h).
//
// Each process is connected to every other one, so all notice at once if one ends before the end of the job.
// A process that is waiting for messages then throws LostRank, an ordinary error. A process that is busy and
// does not return soon is ended by its listener thread.
#pragma once

#include <memory>
#include <stdexcept>
#include <vector>

#include "llmc/comm/rendezvous.h"
#include "llmc/comm/transport.h"

namespace llmc {

// Another process of the job is gone.
class LostRank : public std::runtime_error {
  public:
    using std::runtime_error::runtime_error;
};

// links: the links to all ranks; the process's own is empty.
std::unique_ptr<Transport> make_tcp_transport(int rank, std::vector<Link> links);
// The transport of a job of one process.
std::unique_ptr<Transport> make_lone_transport();

}  // namespace llmc
