#include "llmc/comm/connection.h"

#include <sys/socket.h>
#include <sys/uio.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>

namespace llmc {

void Connection::withdraw(const Parcel& parcel) {
    std::erase(to_send_, &parcel);
    std::erase(expected_, &parcel);
    // The receiver would take what follows for the rest of this partly sent message.
    if (!parcel.receives && parcel.moved > 0) closed_ = true;
    if (parcel_ == &parcel) {
        parcel_ = nullptr;
        goal_ = Goal::nowhere;
    }
}

bool Connection::move() {
    if (closed_) return false;
    bool any = false;
    while (!closed_ && !to_send_.empty() && send_first()) any = true;
    if (!aside_.empty() && !expected_.empty()) take_from_aside();
    while (!closed_ && (!expected_.empty() || parcel_ != nullptr)) {
        if (header_received_ < sizeof header_ ? !receive_header() : !receive_body()) break;
        any = true;
    }
    return any;
}

// Returns whether any byte of the first parcel was sent.
bool Connection::send_first() {
    Parcel& parcel = *to_send_.front();
    const Header header{parcel.tag, 0, parcel.bytes};
    const std::size_t header_sent = std::min(parcel.moved, sizeof header);
    const std::size_t body_sent = parcel.moved - header_sent;
    std::array<iovec, 2> parts{};
    // (sendmsg only reads, but iovec has no const pointer.)
    parts[0].iov_base = const_cast<std::byte*>(bytes_of(header).data()) + header_sent;
    parts[0].iov_len = sizeof header - header_sent;
    parts[1].iov_base = const_cast<std::byte*>(parcel.source) + body_sent;
    parts[1].iov_len = parcel.bytes - body_sent;
    msghdr message{};
    message.msg_iov = parts.data();
    message.msg_iovlen = parts.size();
    const ssize_t count = sendmsg(socket_.file(), &message, MSG_NOSIGNAL);
    if (count < 0) {
        closed_ = errno != EAGAIN && errno != EWOULDBLOCK && errno != EINTR;
        return false;
    }
    parcel.moved += static_cast<std::size_t>(count);
    if (parcel.moved == sizeof header + parcel.bytes) {
        parcel.done = true;
        to_send_.erase(to_send_.begin());
    }
    return true;
}

bool Connection::receive_header() {
    const Moved part = receive_some(socket_, bytes_of(header_).subspan(header_received_));
    closed_ = part.closed;
    header_received_ += part.bytes;
    return part.bytes > 0;
}

// Returns whether any byte of the body arrived. Also true for a message without a body.
bool Connection::receive_body() {
    if (goal_ == Goal::unknown) place_body();
    const std::size_t total = header_.bytes;
    std::array<std::byte, 16384> nowhere;
    Moved part;
    if (body_received_ < total) {
        std::byte* to = goal_ == Goal::parcel  ? parcel_->room + body_received_
                        : goal_ == Goal::aside ? aside_.back().bytes.data() + body_received_
                                               : nowhere.data();
        const std::size_t most = goal_ == Goal::nowhere ? nowhere.size() : total;
        part = receive_some(socket_, {to, std::min(most, total - body_received_)});
        closed_ = part.closed;
        body_received_ += part.bytes;
        if (part.bytes == 0) return false;
    }
    if (body_received_ == total) {
        if (parcel_ != nullptr) {
            parcel_->sent = total;
            parcel_->done = true;
        }
        parcel_ = nullptr;
        goal_ = Goal::unknown;
        header_received_ = body_received_ = 0;
        if (!aside_.empty()) take_from_aside();
    }
    return true;
}

void Connection::place_body() {
    parcel_ = take_expected(header_.tag);
    if (parcel_ == nullptr) {
        goal_ = Goal::aside;
        aside_.push_back({header_.tag, std::vector<std::byte>(header_.bytes)});
    } else {
        goal_ = parcel_->bytes == header_.bytes ? Goal::parcel : Goal::nowhere;
    }
}

// Delivers messages that are whole in aside_ and that a parcel now expects.
void Connection::take_from_aside() {
    const std::size_t whole = aside_.size() - (goal_ == Goal::aside ? 1 : 0);
    std::size_t kept = 0;
    for (std::size_t i = 0; i < aside_.size(); ++i) {
        Aside& aside = aside_[i];
        Parcel* parcel = i < whole ? take_expected(aside.tag) : nullptr;
        if (parcel == nullptr) {
            std::swap(aside_[kept++], aside);
            continue;
        }
        parcel->sent = aside.bytes.size();
        if (parcel->sent == parcel->bytes && parcel->bytes > 0)
            std::memcpy(parcel->room, aside.bytes.data(), parcel->bytes);
        parcel->done = true;
    }
    aside_.resize(kept);
}

Parcel* Connection::take_expected(int tag) {
    const auto first = std::ranges::find(expected_, tag, &Parcel::tag);
    if (first == expected_.end()) return nullptr;
    Parcel* parcel = *first;
    expected_.erase(first);
    return parcel;
}

}  // namespace llmc
