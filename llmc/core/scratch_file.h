// A file for what does not fit into memory. It has no name, so that nothing is left behind however the process ends,
// and two runs may use one directory. Four threads read and write it past the page cache (O_DIRECT), 1 MiB at a time.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

namespace llmc {

class ScratchFile {
  public:
    // Places in the file, numbers of bytes, and addresses in memory are multiples of this.
    static constexpr std::size_t alignment = 4096;

    // Makes the directory if it is absent. The file begins as zeros. UserError, with the reason, for a directory in
    // memory (tmpfs, ramfs), without room for `bytes`, or in which no file can be made.
    // `without` are the options that would do without the file, for errors.
    ScratchFile(std::string directory, std::uint64_t bytes, std::string without);
    ~ScratchFile();  // waits for what has begun
    ScratchFile(const ScratchFile&) = delete;
    ScratchFile& operator=(const ScratchFile&) = delete;

    // Begin a transfer and return its number. Transfers that overlap must not run at once.
    int begin_read(std::uint64_t place, std::byte* to, std::size_t bytes);
    int begin_write(std::uint64_t place, const std::byte* from, std::size_t bytes);
    // Whether a transfer is done, once; UserError if it failed. wait() returns when it is.
    bool is_done(int transfer);
    void wait(int transfer);

    // What has been moved so far, and the seconds for which something was moving.
    struct Traffic {
        std::uint64_t read = 0, written = 0;
        double seconds = 0;
    };
    Traffic traffic() const;

    // Bytes a second. 0 if the file is too small to tell.
    struct Speed {
        double read = 0, written = 0;
    };
    // Measures them with the file's first 256 MiB, which become zeros. Only before anything is written.
    Speed probe();

    // What the user should know of this file system; empty if all is as it should be.
    const std::string& note() const { return note_; }

  private:
    struct Piece {
        int transfer;
        bool writes;
        std::uint64_t place;
        std::byte* memory;
        std::size_t bytes;
    };
    struct Transfer {
        std::size_t pieces = 0;  // that are not done
        std::string fault{};
    };

    void open();
    int begin(bool writes, std::uint64_t place, std::byte* memory, std::size_t bytes);
    void work();
    std::string perform(const Piece& piece) const;
    bool finish(int transfer);

    std::string directory_, without_, note_;
    std::uint64_t bytes_;
    int file_ = -1;
    bool is_direct_ = true;

    mutable std::mutex mutex_;  // guards all that follows
    std::condition_variable begun_, done_;
    std::deque<Piece> pieces_;
    std::map<int, Transfer> transfers_;
    Traffic traffic_;  // of pieces that are done
    std::size_t moving_ = 0;
    std::chrono::steady_clock::time_point busy_since_;
    int next_ = 0;
    bool stops_ = false;
    std::vector<std::thread> threads_;
};

}  // namespace llmc
