// The messages to and from one other process over TCP. A message is a header with its tag and length, then
// its bytes.
//
// Messages are sent in the order of posting. Arriving bytes go directly into the parcel that expects them,
// without a copy. While no parcel is expected, they stay in the socket's buffer. A message is put aside only
// if it arrives before another one that is expected.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "llmc/comm/socket.h"

namespace llmc {

// One message of this process and its progress.
struct Parcel {
    int peer = 0;
    int tag = 0;
    bool receives = false;
    const std::byte* source = nullptr;  // the bytes to send
    std::byte* room = nullptr;          // the memory to receive into
    std::size_t bytes = 0;
    std::size_t moved = 0;  // bytes sent, of the header and then of the body
    // Bytes that the sender announced, set when a receive is done. If this differs from `bytes`, none of the
    // data is in `room`.
    std::size_t sent = 0;
    bool done = false;
};

class Connection {
  public:
    explicit Connection(Socket socket) : socket_(std::move(socket)) {}

    // A parcel must stay at its address until it is done or withdrawn.
    void post(Parcel& parcel) { (parcel.receives ? expected_ : to_send_).push_back(&parcel); }
    void withdraw(const Parcel& parcel);

    // Moves what can move now. Returns whether anything moved.
    bool move();
    // The other end is gone, or a message was sent only in part. Data that had arrived before was received.
    bool is_closed() const { return closed_; }
    bool is_idle() const { return expected_.empty() && to_send_.empty() && parcel_ == nullptr; }

  private:
    struct Header {
        std::int32_t tag = 0;
        std::int32_t reserved = 0;
        std::uint64_t bytes = 0;
    };
    struct Aside {
        int tag;
        std::vector<std::byte> bytes;
    };

    bool send_first();
    bool receive_header();
    bool receive_body();
    void place_body();
    void take_from_aside();
    Parcel* take_expected(int tag);

    Socket socket_;
    std::vector<Parcel*> to_send_;
    std::vector<Parcel*> expected_;
    std::vector<Aside> aside_;
    bool closed_ = false;

    // The message that is arriving: the received bytes of its header and of its body, and where the body
    // goes. The goal is a parcel, aside_ or nowhere, and unknown until the header is whole.
    Header header_;
    std::size_t header_received_ = 0;
    std::size_t body_received_ = 0;
    enum class Goal { unknown, parcel, aside, nowhere } goal_ = Goal::unknown;
    Parcel* parcel_ = nullptr;
};

}  // namespace llmc
