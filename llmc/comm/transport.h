// What carries messages between the processes of a job: MPI (transport_mpi.h) or TCP (transport_tcp.h). The
// collectives and their watchdog (exchange.h, host_communicator.h) are the same over both.
//
// No call waits for another process but those of the job's end. One thread of a process communicates at a time.
#pragma once

#include <cstddef>
#include <memory>
#include <string_view>

namespace llmc {

// Messages that are under way together: posted, then polled until all are done. Begun again and again, so that a
// step of training allocates nothing.
class Messages {
  public:
    virtual ~Messages() = default;

    // Forgets all messages; those that follow have the tag. `call` names the communicator's call to a person.
    virtual void begin(int tag, std::string_view call) = 0;

    // Peers are ranks of the job. Messages of one (sender, receiver, tag) arrive in the order of their posting.
    // Buffers must live until the message is done. A message of no bytes is sent too.
    virtual void send(int to, const std::byte* data, std::size_t bytes) = 0;
    virtual void recv(int from, std::byte* data, std::size_t bytes) = 0;

    // Moves what can move now. Whether anything did. A message of another size than its receiver expects is a
    // ProgrammingError.
    virtual bool poll() = 0;
    // How many are not done; whether one is, by the order of posting.
    virtual std::size_t open() const = 0;
    virtual bool is_done(std::size_t message) const = 0;
};

class Transport {
  public:
    virtual ~Transport() = default;

    virtual int rank() const = 0;
    virtual int size() const = 0;
    // Tags go from 0 to this.
    virtual int largest_tag() const = 0;

    virtual std::unique_ptr<Messages> messages() = 0;

    // Apart from all messages: tells all others that a wait of this rank has become long, or that one such is over (each
    // that was told is taken back once); whether another rank's is now, as far as its news has come.
    virtual void tell_waiting(bool waits) = 0;
    virtual bool is_waiting(int rank) = 0;
    // Takes in such news, which would heap up where a rank never asks for it. To be called now and then.
    virtual void hear() = 0;

    // The job's end, which all ranks come to at about the same time: of this process's part; of the whole job, with
    // a status that is not 0, silently. (Does not return, nor does abort; g++ knows no [[noreturn]] of virtual ones.)
    virtual void finish() = 0;
    virtual void end(int status) = 0;

    // Of a rank that has failed: whether it is the one to say why. Often several fail, at about the same moment or one
    // after the other, and one of them speaks; the others hear of it before this returns.
    virtual bool speaks_of_failure() = 0;

    // Ends the job where another rank is known to have failed or to be gone, with a line of one rank. (MPI's launcher
    // does that by itself.)
    virtual void end_if_lost() = 0;

    // The job's end at any time, with status 1: of all processes at once; of this one, where another has failed,
    // says so and ends the job. give_way returns if that one does not.
    virtual void abort() = 0;
    virtual void give_way() = 0;
};

// Prints `line` on standard error and ends all processes of the job with status 1, at once.
[[noreturn]] void abort_job(Transport& transport, std::string_view line);

// The same with `error: what`, of one rank where several fail at about the same moment or one after the other.
[[noreturn]] void fail_job(Transport& transport, std::string_view what);

}  // namespace llmc
