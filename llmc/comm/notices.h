// Notices between ranks without MPI (transport_tcp.cpp): words of one byte, on connections of their own. They tell
// which rank waits, which one has failed, and which one may report why.
#pragma once

#include <atomic>
#include <chrono>
#include <functional>
#include <vector>

#include "llmc/comm/socket.h"

namespace llmc {

enum class Notice : char {
    waits = 'w',    // The sender has waited for long.
    goes_on = 'o',  // Such a wait is over.
    asks = 'a',     // The sender asks whether it may report why the job fails.
    granted = 'g',  // Yes.
    refused = 'r',  // No, another rank may.
    failed = 'f',   // The sender has failed and reported why.
    ends = 'e',     // The sender ends, because another rank has failed and reported why.
    done = 'd'      // The sender is done with the whole job.
};

// The notices of another rank. One thread hears them; other threads may read what it heard.
struct Heard {
    std::atomic<int> long_waits = 0;  // unfinished long waits
    std::atomic<bool> granted = false;
    std::atomic<bool> refused = false;
    std::atomic<bool> failed = false;
    std::atomic<bool> ends = false;
    std::atomic<bool> done = false;
    std::atomic<bool> gone = false;
};

class Notices {
  public:
    // sockets: by rank; the own rank's is empty
    Notices(int rank, std::vector<Socket> sockets);

    // To all other ranks, or to one
    void say(Notice notice);
    void say(Notice notice, int rank);

    const Heard& from(int rank) const { return heard_[static_cast<std::size_t>(rank)]; }
    // Whether another rank has failed or is gone, and since when
    bool has_trouble() const { return has_trouble_; }
    std::chrono::steady_clock::time_point trouble_since() const { return trouble_since_; }
    bool somebody_says_why() const;
    bool have_all_ended() const;

    // Waits up to `limit` for notices, or until the file `wake` can be read; a negative limit means no limit.
    // `may_report` answers a rank that asks.
    void hear(std::chrono::milliseconds limit, int wake, const std::function<bool(int)>& may_report);

  private:
    void hear_from(int rank, const std::function<bool(int)>& may_report);
    int size() const { return static_cast<int>(sockets_.size()); }

    int rank_;
    std::vector<Socket> sockets_;
    std::vector<Heard> heard_;
    std::atomic<bool> has_trouble_ = false;
    std::chrono::steady_clock::time_point trouble_since_;
};

}  // namespace llmc
