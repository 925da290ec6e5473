// How the processes of a job find each other without MPI. All connect to rank 0, at an address that all know.
// Rank 0 tells them the addresses of the others, and each connects to each. Connections of strangers, such as
// a port scanner, are ignored.
#pragma once

#include <chrono>
#include <cstdint>
#include <exception>
#include <optional>
#include <string>
#include <vector>

#include "llmc/comm/socket.h"

namespace llmc {

// The settings of one process for the rendezvous.
struct Invitation {
    int rank = 0;
    int size = 1;
    std::string host;  // the machine on which rank 0 listens: MASTER_ADDR
    std::uint16_t port = 0;
    std::optional<int> listener{};  // rank 0's socket if it listens at `port` already
    std::chrono::duration<double> patience = std::chrono::minutes(5);
    std::string version;  // the program's version; must be the same in all processes
};

// The two connections to one other rank: one for messages, and one for notices, which never wait behind
// messages.
struct Link {
    Socket messages;
    Socket notices;
};

// Thrown if this process must end silently, because another one reports the error.
class EndsQuietly : public std::exception {};

// Returns the links to all ranks, as soon as all ranks have theirs; the process's own link is empty. On an
// error, the process that must report it throws UserError, and the others throw EndsQuietly.
std::vector<Link> find_peers(const Invitation& invitation);

}  // namespace llmc
