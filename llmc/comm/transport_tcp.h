// Messages over TCP, between processes that need no MPI to find each other (meeting.h).
//
// A process that ends without having come to the end of the job is found by the others, each of which is connected to
// it, at once. Where this process waits for messages that is an error as any other (LostRank); where it is busy with
// something else and does not come back soon, a thread beside it ends it.
#pragma once

#include <memory>
#include <stdexcept>
#include <vector>

#include "llmc/comm/meeting.h"
#include "llmc/comm/transport.h"

namespace llmc {

// Another process of the job is gone.
class LostRank : public std::runtime_error {
  public:
    using std::runtime_error::runtime_error;
};

// links: to all ranks (its own is empty).
std::unique_ptr<Transport> make_tcp_transport(int rank, std::vector<Link> links);
// Of a job of one process.
std::unique_ptr<Transport> make_lone_transport();

}  // namespace llmc
