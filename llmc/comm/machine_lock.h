// A lock that one process per machine holds at a time. It lets one process print an error that several find.
#pragma once

#include <optional>
#include <string>
#include <string_view>

#include "llmc/comm/socket.h"

namespace llmc {

// A named lock that one process per machine holds at a time. Only processes with the same parent (a launcher,
// a shell) compete for it. The system releases it when its holder ends.
class MachineLock {
  public:
    explicit MachineLock(std::string_view lock);

    // Tries to take the lock. True if this process holds it, and also if the system could not create it.
    bool claim();
    // For the holder: waits until another process tries to take the lock. False if none does before `end`.
    bool wait_for_another(Deadline end) const;

  private:
    std::string name_;
    Socket socket_;
};

// Prints the text on standard error, unless a process with the same parent printed the same text within the
// last two seconds. Returns once `others` more processes have called this with the same text. If `others` is
// unknown, or fewer come, returns after those two seconds.
void print_once_per_machine(const std::string& text, std::optional<int> others);

}  // namespace llmc
