#include "llmc/core/scratch_file.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <linux/magic.h>
#include <sys/statfs.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <memory>
#include <utility>

#include "llmc/core/error.h"
#include "llmc/core/text.h"

namespace llmc {

namespace {

constexpr int workers = 4;
constexpr std::size_t request = std::size_t{1} << 20;

std::string reason_of(int error) { return std::strerror(error); }

double seconds_since(std::chrono::steady_clock::time_point begin) {
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

struct Free {
    void operator()(std::byte* memory) const { std::free(memory); }
};
using Memory = std::unique_ptr<std::byte[], Free>;

Memory zeros_of(std::size_t bytes) {
    Memory memory(static_cast<std::byte*>(std::aligned_alloc(ScratchFile::alignment, bytes)));
    std::memset(memory.get(), 0, bytes);
    return memory;
}

// A file without a name. Some file systems need one for a moment.
int open_without_name(const std::string& directory, int flags) {
    const int file = ::open(directory.c_str(), O_TMPFILE | O_RDWR | O_CLOEXEC | flags, 0600);
    if (file >= 0 || (errno != EOPNOTSUPP && errno != EISDIR && errno != ENOENT)) return file;
    std::string name = directory + "/train_gpt-XXXXXX";
    const int named = mkostemp(name.data(), O_CLOEXEC | flags);
    if (named >= 0) unlink(name.c_str());
    return named;
}

}  // namespace

ScratchFile::ScratchFile(std::string directory, std::uint64_t bytes, std::string without)
    : directory_(std::move(directory)), without_(std::move(without)), bytes_(bytes) {
    namespace fs = std::filesystem;
    std::error_code error;
    const fs::file_status there = fs::symlink_status(directory_, error);
    if (fs::exists(there) && !fs::is_directory(directory_, error))
        user_error("--nvme-dir {}: this is {}; give a directory", directory_,
                   fs::is_symlink(there) ? "a link to no directory" : "a file");
    const bool is_new = fs::create_directories(directory_, error);
    if (error) user_error("--nvme-dir {}: cannot make the directory: {}", directory_, error.message());
    struct statfs system {};
    if (statfs(directory_.c_str(), &system) != 0)
        user_error("--nvme-dir {}: {}", directory_, reason_of(errno));
    const bool is_in_memory = system.f_type == TMPFS_MAGIC || system.f_type == RAMFS_MAGIC;
    if (is_in_memory && is_new) fs::remove(directory_, error);
    if (is_in_memory)
        user_error(
            "--nvme-dir {} lies in memory ({}), where nothing would be saved; give a directory on a disk",
            directory_, system.f_type == TMPFS_MAGIC ? "tmpfs" : "ramfs");
    open();
    for (int i = 0; i < workers; ++i) threads_.emplace_back([this] { work(); });
}

ScratchFile::~ScratchFile() {
    {
        const std::lock_guard lock(mutex_);
        stops_ = true;
    }
    begun_.notify_all();
    for (std::thread& thread : threads_) thread.join();
    if (file_ >= 0) close(file_);
}

void ScratchFile::open() {
    const std::uint64_t bytes = bytes_;
    file_ = open_without_name(directory_, O_DIRECT);
    if (file_ < 0 && errno == EINVAL) {
        is_direct_ = false;
        file_ = open_without_name(directory_, 0);
        note_ = fmt::format(
            "--nvme-dir {}: the file system has no direct access, so that data pass through the "
            "page cache",
            directory_);
    }
    if (file_ < 0) user_error("--nvme-dir {}: cannot make a file: {}", directory_, reason_of(errno));
    if (bytes == 0) return;
    const auto fail = [&](int error) {
        close(std::exchange(file_, -1));
        struct statvfs room {};
        const std::uint64_t available =
            statvfs(directory_.c_str(), &room) == 0 ? std::uint64_t{room.f_bavail} * room.f_frsize : 0;
        user_error("--nvme-dir {}: no file of {}: {}; {} are available there", directory_,
                   human_bytes(static_cast<double>(bytes)), reason_of(error),
                   human_bytes(static_cast<double>(available)));
    };
    if (fallocate(file_, 0, 0, static_cast<off_t>(bytes)) == 0) return;
    const int refused = errno;
    if (refused != EOPNOTSUPP && refused != ENOSYS) fail(refused);
    // Writes that find no room later would end a run in its middle.
    note_ +=
        fmt::format("{}--nvme-dir {}: the file system reserves no room; {} of zeros were written instead",
                    note_.empty() ? "" : "\nnote: ", directory_, human_bytes(static_cast<double>(bytes)));
    const Memory zeros = zeros_of(request);
    std::string fault;
    for (std::uint64_t place = 0; place < bytes && fault.empty(); place += request)
        fault = perform({0, true, place, zeros.get(),
                         static_cast<std::size_t>(std::min<std::uint64_t>(request, bytes - place))});
    if (!fault.empty()) user_error("{}", fault);
}

int ScratchFile::begin_read(std::uint64_t place, std::byte* to, std::size_t bytes) {
    return begin(false, place, to, bytes);
}
int ScratchFile::begin_write(std::uint64_t place, const std::byte* from, std::size_t bytes) {
    return begin(true, place, const_cast<std::byte*>(from), bytes);
}

int ScratchFile::begin(bool writes, std::uint64_t place, std::byte* memory, std::size_t bytes) {
    check(place % alignment == 0 && bytes % alignment == 0 &&
              reinterpret_cast<std::uintptr_t>(memory) % alignment == 0,
          "transfers of a scratch file are aligned");
    int number = 0;
    {
        const std::lock_guard lock(mutex_);
        number = next_++;
        Transfer& transfer = transfers_[number];
        for (std::size_t done = 0; done < bytes; done += request, ++transfer.pieces)
            pieces_.push_back({number, writes, place + done, memory + done, std::min(request, bytes - done)});
    }
    begun_.notify_all();
    return number;
}

bool ScratchFile::is_done(int transfer) {
    const std::lock_guard lock(mutex_);
    return finish(transfer);
}

void ScratchFile::wait(int transfer) {
    std::unique_lock lock(mutex_);
    done_.wait(lock, [&] { return transfers_.at(transfer).pieces == 0; });
    finish(transfer);
}

bool ScratchFile::finish(int transfer) {
    const auto found = transfers_.find(transfer);
    check(found != transfers_.end(), "a transfer is asked for until it is done, and once");
    if (found->second.pieces > 0) return false;
    const std::string fault = std::move(found->second.fault);
    transfers_.erase(found);
    if (!fault.empty()) user_error("{}", fault);
    return true;
}

ScratchFile::Speed ScratchFile::probe() {
    constexpr std::size_t probed = std::size_t{1} << 28, at_once = std::size_t{1} << 24;
    if (bytes_ < probed) return {};
    const Memory zeros = zeros_of(at_once);
    const auto seconds_of = [&](const auto& begin_one) {
        const auto begin = std::chrono::steady_clock::now();
        for (std::uint64_t place = 0; place < probed; place += at_once) wait(begin_one(place));
        return seconds_since(begin);
    };
    const double written =
        seconds_of([&](std::uint64_t place) { return begin_write(place, zeros.get(), at_once); });
    const double read =
        seconds_of([&](std::uint64_t place) { return begin_read(place, zeros.get(), at_once); });
    const std::lock_guard lock(mutex_);
    traffic_ = {};
    return {static_cast<double>(probed) / read, static_cast<double>(probed) / written};
}

ScratchFile::Traffic ScratchFile::traffic() const {
    const std::lock_guard lock(mutex_);
    Traffic traffic = traffic_;
    if (moving_ > 0) traffic.seconds += seconds_since(busy_since_);
    return traffic;
}

void ScratchFile::work() {
    std::unique_lock lock(mutex_);
    while (true) {
        begun_.wait(lock, [&] { return stops_ || !pieces_.empty(); });
        if (pieces_.empty()) return;
        const Piece piece = pieces_.front();
        pieces_.pop_front();
        if (moving_++ == 0) busy_since_ = std::chrono::steady_clock::now();
        lock.unlock();
        std::string fault = perform(piece);
        lock.lock();
        if (--moving_ == 0) traffic_.seconds += seconds_since(busy_since_);
        (piece.writes ? traffic_.written : traffic_.read) += piece.bytes;
        Transfer& transfer = transfers_.at(piece.transfer);
        if (!fault.empty()) transfer.fault = std::move(fault);
        if (--transfer.pieces == 0) done_.notify_all();
    }
}

// Returns the fault; empty if there is none. A short result is submitted again.
std::string ScratchFile::perform(const Piece& piece) const {
    const auto fault = [&](std::string_view reason) {
        return fmt::format(
            "--nvme-dir {}: cannot {} what is offloaded: {}; start again or resume with another directory, "
            "or with {}",
            directory_, piece.writes ? "write" : "read", reason, without_);
    };
    for (std::size_t done = 0; done < piece.bytes;) {
        const auto place = static_cast<off_t>(piece.place + done);
        const ssize_t moved = piece.writes ? pwrite(file_, piece.memory + done, piece.bytes - done, place)
                                           : pread(file_, piece.memory + done, piece.bytes - done, place);
        if (moved < 0 && errno == EINTR) continue;
        if (moved < 0) return fault(reason_of(errno));
        // Direct access goes on at a whole block.
        const bool is_short = static_cast<std::size_t>(moved) < piece.bytes - done;
        const std::size_t whole = is_direct_ && is_short
                                      ? static_cast<std::size_t>(moved) / alignment * alignment
                                      : static_cast<std::size_t>(moved);
        if (whole == 0)
            return fault(piece.writes ? "the disk takes less than a block" : "the file ends early");
        done += whole;
    }
    if (is_direct_) return {};
    // So that the page cache does not take the memory that the file is to save.
    const auto place = static_cast<off_t>(piece.place), bytes = static_cast<off_t>(piece.bytes);
    if (piece.writes && sync_file_range(file_, place, bytes,
                                        SYNC_FILE_RANGE_WAIT_BEFORE | SYNC_FILE_RANGE_WRITE |
                                            SYNC_FILE_RANGE_WAIT_AFTER) != 0)
        return fault(reason_of(errno));
    posix_fadvise(file_, place, bytes, POSIX_FADV_DONTNEED);
    return {};
}

}  // namespace llmc
