// Keeps two starts of the program from writing into the folder of one run, or into one file of metrics, at the
// same time. A scheduler may start a job again while the old one is still saving.
#pragma once

#include <filesystem>
#include <string>
#include <string_view>
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

// The text of a folder's run.json, which changes with every start that writes there; empty if there is none.
std::string record_in(const std::filesystem::path& out_dir);

// Rank 0's locks on what this start writes.
class RunLocks {
  public:
    // A folder or file that one start at a time may write to.
    struct Output {
        std::string_view option;
        std::filesystem::path path, lock;
    };

    RunLocks() = default;
    ~RunLocks();
    RunLocks(const RunLocks&) = delete;
    RunLocks& operator=(const RunLocks&) = delete;

    // Locks what the options name. If another process holds one of these, or began a run in the folder while this
    // start was prepared: false with --resume-if-any, and then the run must be prepared again; else UserError. A
    // note if the file system has no locks. All ranks call it and receive the same answer.
    bool lock_named(const PreparedRun& run);
    // Releases all locks: the run is prepared again.
    void release();
    // Locks the folder that a new run without --out-dir has made, and the metrics in it.
    void lock_own_folder(const PreparedRun& run);

  private:
    // False if another process holds one and --resume-if-any is given.
    bool lock(const PreparedRun& run, const std::vector<Output>& outputs);

    std::vector<FileLock> locks_;
};

}  // namespace llmc
