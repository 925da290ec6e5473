// What several processes of one machine find wrong, said by one of them.
#pragma once

#include <optional>
#include <string>
#include <string_view>

#include "llmc/comm/socket.h"

namespace llmc {

// A word that of all processes of this machine with the same parent (a launcher, a shell) one has at a time. The system
// takes it back when that process ends.
class LocalWord {
  public:
    explicit LocalWord(std::string_view word);

    // Tries to have it: true where this process has it, or where the system lends no names.
    bool claim();
    // Of the process that has it: waits for another to come for it. False where none came until then.
    bool wait_for_another(Deadline end) const;

  private:
    std::string name_;
    Socket socket_;
};

// Prints the text on standard error, unless another process of the same parent has printed the same two seconds ago
// at most. Returns as soon as so many others have come to say it, or, where that is not known or fewer come, after
// those two seconds.
void say_once_here(const std::string& text, std::optional<int> others);

}  // namespace llmc
