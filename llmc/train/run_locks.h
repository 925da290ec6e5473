// Keeps two starts of the program from writing into the folder of one run, or into one file of metrics, at the
// same time. A scheduler may start a job again while the old one is still saving.
#pragma once

#include <string>
#include <vector>

#include "llmc/io/file_lock.h"
#include "llmc/train/prepared_run.h"

namespace llmc {

// If another process writes where this start will write: UserError with the name of that process. With
// --resume-if-any, waits first until it ends, for two minutes at most or until a signal asks to stop. Takes no
// lock. If this start resumes a run, it then reads the options again, because the run may have gone on. All ranks
// call it.
// Returns the text of the run.json that it found in the folder; empty if there was none.
std::string wait_for_other_starts(Session& session);

// Rank 0's locks on what this start writes.
class RunLocks {
  public:
    // UserError if another process holds one of them, or began a run in the folder while this start was prepared.
    // A note if the file system has no locks.
    explicit RunLocks(const PreparedRun& run);

  private:
    std::vector<FileLock> locks_;
};

}  // namespace llmc
