#include "llmc/io/file_lock.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstring>
#include <system_error>
#include <utility>

#include "llmc/core/text.h"

namespace llmc {

namespace {

namespace fs = std::filesystem;

// A lock on the whole file. It belongs to the open file (open file description), so that closing another
// descriptor of the same file does not release it.
struct flock whole_file() {
    struct flock lock {};
    lock.l_type = F_WRLCK;
    lock.l_whence = SEEK_SET;
    return lock;
}

std::string own_name() {
    std::array<char, 256> machine{};
    if (gethostname(machine.data(), machine.size() - 1) != 0) machine[0] = '?';
    return fmt::format("process {} on machine {}\n", getpid(), machine.data());
}

std::string holder_in(int descriptor) {
    std::array<char, 512> text{};
    const ssize_t length = pread(descriptor, text.data(), text.size(), 0);
    const std::string_view all(text.data(), length > 0 ? static_cast<std::size_t>(length) : 0);
    const std::string line = with_replacements(one_line(all.substr(0, all.find('\n'))));
    return line.empty() ? "another process" : line;  // it may not have written its name yet
}

// Whether the name still leads to the open file. The holder of a lock removes the file before it releases it.
bool is_named(const fs::path& file, int descriptor) {
    struct stat opened {
    }, named{};
    return fstat(descriptor, &opened) == 0 && stat(file.c_str(), &named) == 0 &&
           opened.st_dev == named.st_dev && opened.st_ino == named.st_ino;
}

}  // namespace

std::optional<std::string> lock_holder(const fs::path& file) {
    const int descriptor = open(file.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (descriptor < 0) return std::nullopt;
    struct flock found = whole_file();
    const bool is_held = fcntl(descriptor, F_OFD_GETLK, &found) == 0 && found.l_type != F_UNLCK;
    std::optional<std::string> holder;
    if (is_held) holder = holder_in(descriptor);
    close(descriptor);
    return holder;
}

FileLock::FileLock(fs::path file) : file_(std::move(file)) {
    make_folders();
    take();
}

FileLock::FileLock(FileLock&& other) noexcept
    : file_(std::move(other.file_)),
      new_folders_(std::exchange(other.new_folders_, {})),
      descriptor_(std::exchange(other.descriptor_, -1)),
      holder_(std::move(other.holder_)),
      fault_(std::move(other.fault_)) {}

FileLock::~FileLock() {
    std::error_code ignored;
    if (descriptor_ >= 0) {
        fs::remove(file_, ignored);
        close(descriptor_);
    }
    for (const fs::path& folder : new_folders_) fs::remove(folder, ignored);  // only if it is empty
}

void FileLock::make_folders() {
    std::error_code error;
    const fs::path folder = file_.parent_path();
    for (fs::path missing = folder; !missing.empty() && !fs::exists(fs::symlink_status(missing, error));
         missing = missing.parent_path())
        new_folders_.push_back(missing);
    if (!folder.empty()) fs::create_directories(folder, error);
}

void FileLock::take() {
    for (;;) {
        descriptor_ = open(file_.c_str(), O_RDWR | O_CREAT | O_CLOEXEC | O_NONBLOCK, 0666);
        if (descriptor_ < 0) {
            fault_ = std::strerror(errno);
            return;
        }
        struct flock lock = whole_file();
        if (fcntl(descriptor_, F_OFD_SETLK, &lock) != 0) {
            if (errno == EAGAIN || errno == EACCES) {
                holder_ = holder_in(descriptor_);
            } else {
                fault_ = std::strerror(errno);
            }
            close(std::exchange(descriptor_, -1));
            return;
        }
        if (is_named(file_, descriptor_)) break;
        close(std::exchange(descriptor_, -1));
    }
    // If the disk is full, the lock holds all the same, and only the message to others lacks the name.
    const std::string name = own_name();
    if (ftruncate(descriptor_, 0) == 0)
        static_cast<void>(pwrite(descriptor_, name.data(), name.size(), 0) < 0);
}

}  // namespace llmc
