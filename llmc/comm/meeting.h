// How the processes of a job find each other without MPI: all come to the one with rank 0, which listens at an address
// that all know, are told the addresses of the others, and connect to each. Strangers at the ports, such as a port
// scanner, are not let in and do not disturb.
#pragma once

#include <chrono>
#include <cstdint>
#include <exception>
#include <string>
#include <vector>

#include "llmc/comm/socket.h"

namespace llmc {

// What each process is told to begin with.
struct Invitation {
    int rank = 0;
    int size = 1;
    std::string host;  // of rank 0: MASTER_ADDR
    std::uint16_t port = 0;
    std::chrono::duration<double> patience = std::chrono::minutes(5);
    std::string version;  // of the program: all run the same
};

// The connections to one other rank: messages, and notices, which never wait behind messages.
struct Link {
    Socket messages;
    Socket notices;
};

// A process has to end without a word: another one says why.
class EndsQuietly : public std::exception {};

// The links to all ranks (the process's own is empty), as soon as all have them. What is wrong is a UserError of the
// process that is to say it, and EndsQuietly of the others.
std::vector<Link> meet(const Invitation& invitation);

}  // namespace llmc
