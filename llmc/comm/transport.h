// The interface for messages between the processes of a job, and the functions that make it: over MPI, or
// over TCP between processes that find each other without MPI (rendezvous.h). The collectives and their
// watchdog (exchange.h, host_communicator.h) are the same over both.
//
// Only the calls at the job's end wait for another process. One thread of a process communicates at a time.
#pragma once

#include <cstddef>
#include <memory>
#include <span>
#include <stdexcept>
#include <string_view>
#include <vector>

namespace llmc {

struct Link;  // rendezvous.h

// Messages that are in flight together: posted, then polled until all are done. The object is reused, so that
// a training step allocates nothing.
class Messages {
  public:
    virtual ~Messages() = default;

    // Forgets all messages. The messages that follow have this tag. `call` is the communicator's call, for
    // error messages.
    virtual void begin(int tag, std::string_view call) = 0;

    // Peers are ranks of the job. Messages with the same sender, receiver and tag arrive in the order of
    // posting. Buffers must live until the message is done. Messages of zero bytes are sent too.
    virtual void send(int to, const std::byte* data, std::size_t bytes) = 0;
    virtual void recv(int from, std::byte* data, std::size_t bytes) = 0;

    // Moves what can move now and returns whether anything moved. ProgrammingError if a message has another
    // size than its receiver expects.
    virtual bool poll() = 0;
    // The number of messages that are not done, and whether one is done, numbered in the order of posting.
    virtual std::size_t open() const = 0;
    virtual bool is_done(std::size_t message) const = 0;
};

class Transport {
  public:
    virtual ~Transport() = default;

    virtual int rank() const = 0;
    virtual int size() const = 0;
    // Tags range from 0 to this value.
    virtual int largest_tag() const = 0;

    virtual std::unique_ptr<Messages> messages() = 0;

    // Notices about long waits, separate from all messages. `tell_waiting(true)` tells all other ranks that
    // this rank has waited for long. `tell_waiting(false)`, called once for each true, tells that this wait
    // is over. `is_waiting` returns whether such a wait of `rank` is known here.
    virtual void tell_waiting(bool waits) = 0;
    virtual bool is_waiting(int rank) = 0;
    // Receives such notices. Call it now and then: they would pile up if a rank never asks for them.
    virtual void hear() = 0;

    // End the job normally; all ranks call them at about the same time. `finish` ends this process's part.
    // `end` ends the whole job silently with a nonzero status. (end and abort do not return; g++ ignores
    // [[noreturn]] on virtual functions.)
    virtual void finish() = 0;
    virtual void end(int status) = 0;

    // For a rank that has failed: returns whether it must report the error. Often several ranks fail at about
    // the same moment or one after the other; this returns true on one of them. The ranks `silent` are known
    // to give no answer, so they are not asked.
    virtual bool reports_failure(std::span<const int> silent) = 0;

    // If another rank has failed or is gone, ends the job with one line of one rank. (Does nothing over MPI,
    // because its launcher ends the job.)
    virtual void end_if_lost() = 0;

    // End the job at any time, with status 1. `abort` ends all processes at once. `give_way` leaves this to
    // another rank, which has failed and reports it; over MPI, give_way returns if that rank does not end the
    // job in time.
    virtual void abort() = 0;
    virtual void give_way() = 0;
};

// Whether this program was built with MPI. `make MPI=0` links transport_no_mpi.cpp instead of
// transport_mpi.cpp.
bool has_mpi();

// Joins the job in which mpirun, or another PMI launcher, started this process. A process can do so once.
// UserError in a build without MPI.
std::unique_ptr<Transport> join_mpi_job();

// Messages over TCP. Each process is connected to every other one, so all notice at once if one ends before
// the end of the job. A process that is waiting for messages then throws LostRank, an ordinary error. A
// process that is busy and does not return soon is ended by its listener thread.
//   links: the links to all ranks (rendezvous.h); the process's own is empty
std::unique_ptr<Transport> make_tcp_transport(int rank, std::vector<Link> links);

// Another process of the job is gone.
class LostRank : public std::runtime_error {
  public:
    using std::runtime_error::runtime_error;
};

// The transport of a job of one process.
std::unique_ptr<Transport> make_lone_transport();

// Prints `error: what` on standard error and ends all processes of the job at once, with status 1. If several
// ranks fail at about the same moment or one after the other, one of them prints its line. The ranks `silent`
// are known to give no answer.
[[noreturn]] void fail_job(Transport& transport, std::string_view what, std::span<const int> silent = {});

}  // namespace llmc
