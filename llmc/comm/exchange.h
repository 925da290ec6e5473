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
#include "llmc/comm/watchdog.h"

namespace llmc {

struct ExchangeOptions {
    // How long one wait may last without anything moving.
    Seconds timeout = std::chrono::minutes(10);
    // What is longer is cut: MPI counts in int.
    std::size_t largest_message = std::size_t{1} << 30;
};

// Messages that are under way together (see Messages), of any length, and the wait for them.
class Exchange {
  public:
    Exchange(Transport& transport, const ExchangeOptions& options)
        : options_(options), under_way_(transport.messages()), watchdog_(transport, options.timeout) {}

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
    std::vector<int> awaited() const;

    const ExchangeOptions& options_;
    std::unique_ptr<Messages> under_way_;
    std::vector<Message> messages_;  // in the order of their posting
    std::uint64_t bytes_sent_ = 0;
    Watchdog watchdog_;
};

}  // namespace llmc
