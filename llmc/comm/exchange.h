// Messages between processes under a watchdog: what the collectives of HostCommunicator are made of. All waiting is
// polling against a time limit.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string_view>
#include <vector>

#include "llmc/comm/transport.h"

namespace llmc {

using Seconds = std::chrono::duration<double>;

struct ExchangeOptions {
    // How long one wait may last without anything moving.
    Seconds timeout = std::chrono::minutes(10);
    // What is longer is cut: MPI counts in int.
    std::size_t largest_message = std::size_t{1} << 30;
};

// Several ranks find the same peer dead at about the same moment, and only one may say so. Each has turns of
// its own on the clock, apart from those of the others by as long as the end of a job takes. Ranks beyond the
// first 16 come later still, so that the turns stay frequent.
//   overdue: seconds since the time limit; clock: seconds since any moment that is common to the ranks
bool is_turn_to_speak(int rank, int size, double overdue, double clock);

// Messages that are under way together (see Messages), of any length, and the wait for them.
class Exchange {
  public:
    Exchange(Transport& transport, const ExchangeOptions& options)
        : transport_(transport), options_(options), under_way_(transport.messages()) {}

    // `call` names the communicator's call to a person.
    void begin(int tag, std::string_view call);

    // Peers are ranks of the job. A message of no bytes is sent too.
    void send(int to, const std::byte* data, std::size_t bytes);
    void recv(int from, std::byte* data, std::size_t bytes);
    // Until all is sent and received. Ends the job if nothing moves for longer than the time limit: with a
    // line that names the ranks waited for, of which it leaves out those that are waiting themselves.
    void wait();
    // Moves what can move, without waiting for more; whether all is sent and received. To be asked until it is, under the
    // same watch.
    bool is_done();

    // Since begin().
    std::uint64_t bytes_sent() const { return bytes_sent_; }

  private:
    struct Message {
        int peer;
        bool receives;
    };
    template <class Post>
    void post_in_parts(std::size_t bytes, const Message& message, const Post& post);
    void watch(Seconds waited);
    std::vector<int> awaited() const;
    [[noreturn]] void report(const std::vector<int>& ranks, std::string_view what_they_do) const;

    Transport& transport_;
    const ExchangeOptions& options_;
    std::string_view call_;
    std::unique_ptr<Messages> under_way_;
    std::vector<Message> messages_;  // in the order of their posting
    std::uint64_t bytes_sent_ = 0;
    Seconds waited_{0};  // without anything moving
    std::chrono::steady_clock::time_point last_look_;
    bool told_ = false;  // the other ranks that this one is waiting
};

}  // namespace llmc
