// Messages between processes over MPI, under a watchdog: what the collectives of HostCommunicator are made of.
// No MPI call here blocks: all waiting is polling against a time limit.
#pragma once

#include <mpi.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <source_location>
#include <string_view>
#include <vector>

namespace llmc {

using Seconds = std::chrono::duration<double>;

struct ExchangeOptions {
    // How long one wait may last without any message arriving.
    Seconds timeout = std::chrono::minutes(10);
    // What is longer is cut: MPI counts in int.
    std::size_t largest_message = std::size_t{1} << 30;
};

// Throws a ProgrammingError with MPI's own text unless `code` is MPI_SUCCESS.
void check_mpi(int code, std::string_view call, std::source_location where = std::source_location::current());

// Prints `line` on standard error and ends all processes of the job with status 1, at once.
[[noreturn]] void abort_job(std::string_view line);

// Tags of messages of no bytes that say something of their sender: it has waited for long; it has failed. Those
// of exchanges begin at first_exchange_tag.
inline constexpr int watchdog_tag = 0;
inline constexpr int fault_tag = 1;
inline constexpr int first_exchange_tag = 2;

// Sends such a message to all other ranks, where it stays until the job ends.
void tell_others(int tag);
// Whether a rank has sent one.
bool has_told(int rank, int tag);

// Several ranks find the same peer dead at about the same moment, and only one may say so. Each has turns of
// its own on the clock, apart from those of the others by as long as the end of a job takes. Ranks beyond the
// first 16 come later still, so that the turns stay frequent.
//   overdue: seconds since the time limit; clock: seconds since any moment that is common to the ranks
bool is_turn_to_speak(int rank, int size, double overdue, double clock);

// Messages that are under way together. Messages of one (sender, receiver, tag) arrive in the order of their
// posting. Buffers must live until wait() returns. An Exchange is begun again and again, so that a step of
// training allocates nothing.
class Exchange {
  public:
    explicit Exchange(const ExchangeOptions& options) : options_(options) {}

    // `call` names the communicator's call to a person.
    void begin(int tag, std::string_view call);

    // Peers are ranks in MPI_COMM_WORLD. A message of no bytes is sent too.
    void send(int to, const std::byte* data, std::size_t bytes);
    void recv(int from, std::byte* data, std::size_t bytes);
    // Until all is sent and received. Ends the job if nothing moves for longer than the time limit: with a
    // line that names the ranks waited for, of which it leaves out those that are waiting themselves.
    void wait();

    // Since begin().
    std::uint64_t bytes_sent() const { return bytes_sent_; }

  private:
    struct Message {
        int peer;
        bool receives;
        int bytes;
    };
    template <class Post>
    void post_in_parts(std::size_t bytes, const Post& post);
    void check_arrived(const MPI_Status& status, const Message& message) const;
    void watch(Seconds waited);
    std::vector<int> awaited() const;
    [[noreturn]] void report(const std::vector<int>& ranks, std::string_view what_they_do) const;

    const ExchangeOptions& options_;
    int tag_ = 0;
    std::string_view call_;
    std::vector<MPI_Request> requests_;
    std::vector<Message> messages_;  // of the requests
    std::vector<int> indices_;       // of requests that are done
    std::vector<MPI_Status> statuses_;
    std::uint64_t bytes_sent_ = 0;
    bool told_ = false;  // the other ranks that this one is waiting
};

}  // namespace llmc
