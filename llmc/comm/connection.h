// The messages to and from one other process over TCP: each is a header with its tag and length, then its bytes.
//
// What is sent leaves in the order of posting. What arrives goes to where it is expected without a copy; while nothing
// from that process is expected, it stays with the system. Only a message that comes before another one that is
// expected is put aside.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "llmc/comm/socket.h"

namespace llmc {

// One message of this process, and how far it is.
struct Parcel {
    int peer = 0;
    int tag = 0;
    bool receives = false;
    const std::byte* source = nullptr;  // of what is sent
    std::byte* room = nullptr;          // for what is received
    std::size_t bytes = 0;
    std::size_t moved = 0;  // of what is sent: of its header, then of its bytes
    std::size_t sent =
        0;  // of what is received and done: as many bytes as the sender says; other than `bytes`, none
            // of them is here
    bool done = false;
};

class Connection {
  public:
    explicit Connection(Socket socket) : socket_(std::move(socket)) {}

    // A parcel must stay where it is until it is done or withdrawn.
    void post(Parcel& parcel) { (parcel.receives ? expected_ : to_send_).push_back(&parcel); }
    void withdraw(const Parcel& parcel);

    // Moves what can move now. Whether anything did.
    bool move();
    // The other end is gone, or can no longer be understood; what was on its way here before has been received.
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

    // The message that arrives: how much of its header and of its body has, and where the body goes, as soon as that
    // is known: to a parcel, aside, or nowhere.
    Header header_;
    std::size_t heard_ = 0;
    std::size_t arrived_ = 0;
    enum class Goal { unknown, parcel, aside, nowhere } goal_ = Goal::unknown;
    Parcel* parcel_ = nullptr;
};

}  // namespace llmc
