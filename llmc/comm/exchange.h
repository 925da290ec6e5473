// Messages between processes under a watchdog. The collectives of HostCommunicator are built on it. All
// waiting is polling against a time limit.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "llmc/comm/transport.h"
#include "llmc/comm/watchdog.h"

namespace llmc {

struct ExchangeOptions {
    // The longest wait in which nothing moves.
    Seconds timeout = std::chrono::minutes(10);
    // Another possible cause if that is exceeded, for messages to the user.
    std::string advice{};
    // Longer messages are split, because MPI counts in int.
    std::size_t largest_message = std::size_t{1} << 30;
};

// Messages of any length that are in flight together (see Messages), and the wait for them.
class Exchange {
  public:
    Exchange(Transport& transport, const ExchangeOptions& options)
        : options_(options), in_flight_(transport.messages()), watchdog_(transport, options.timeout) {}

    // `call` is the communicator's call, for messages to the user.
    void begin(int tag, std::string_view call);

    // Peers are ranks of the job. Messages of zero bytes are sent too.
    void send(int to, const std::byte* data, std::size_t bytes);
    void recv(int from, std::byte* data, std::size_t bytes);
    // Waits until all messages are sent and received. If nothing moves for longer than the time limit, ends
    // the job with a line that names the ranks waited for, without those that are waiting themselves.
    void wait();
    // Moves what can move without waiting. Returns whether all messages are sent and received. Call it until
    // it returns true; the same watchdog applies.
    bool is_done();

    // Bytes sent since begin().
    std::uint64_t bytes_sent() const { return bytes_sent_; }

  private:
    struct Message {
        int peer;
        bool receives;
    };
    template <class Post>
    void post_in_parts(std::size_t bytes, const Message& message, const Post& post);
    std::vector<int> awaited() const;

    const ExchangeOptions& options_;
    std::unique_ptr<Messages> in_flight_;
    std::vector<Message> messages_;  // in the order of posting
    std::uint64_t bytes_sent_ = 0;
    Watchdog watchdog_;
};

}  // namespace llmc
