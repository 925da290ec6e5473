#include "llmc/data/mapped_file.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <system_error>

#include "llmc/core/error.h"
#include "llmc/core/text.h"

namespace llmc {
namespace {

[[noreturn]] void cannot_read(const std::string& path, const std::string& option, int error) {
    user_error("{}: cannot read '{}': {}; give a readable file", option, path,
               std::generic_category().message(error));
}

}  // namespace

MappedFile::MappedFile(const std::string& path, const std::string& option) : path_(path) {
    // Without O_NONBLOCK, opening a named pipe would wait for its writer.
    const int file = open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (file < 0 && errno == ENOENT) {
        user_error("{}: there is no file '{}'; give a text file, or token shards as 'PATTERN*.bin' in quotes",
                   option, path);
    }
    if (file < 0) cannot_read(path, option, errno);
    try {
        map(file, option);
    } catch (...) {
        close(file);
        throw;
    }
    close(file);
}

void MappedFile::map(int file, const std::string& option) {
    struct stat status {};
    if (fstat(file, &status) != 0) cannot_read(path_, option, errno);
    if (S_ISDIR(status.st_mode)) {
        user_error("{}: '{}' is a directory; give a file in it, or its token shards as '{}/*.bin' in quotes",
                   option, path_, path_);
    }
    if (!S_ISREG(status.st_mode)) {
        user_error("{}: '{}' is not a regular file, but it is read several times; give a regular file",
                   option, path_);
    }
    size_ = static_cast<std::size_t>(status.st_size);
    if (size_ == 0) user_error("{}: '{}' is empty; give a file with text", option, path_);

    void* mapping = mmap(nullptr, size_, PROT_READ, MAP_SHARED, file, 0);
    if (mapping == MAP_FAILED) cannot_read(path_, option, errno);
    data_ = static_cast<const std::uint8_t*>(mapping);
    device_ = status.st_dev;
    inode_ = status.st_ino;
}

MappedFile::~MappedFile() { munmap(const_cast<std::uint8_t*>(data_), size_); }

void MappedFile::require_whole() const {
    struct stat status {};
    // If the file was removed or replaced, the mapped bytes stay valid.
    const bool is_it =
        stat(path_.c_str(), &status) == 0 && status.st_dev == device_ && status.st_ino == inode_;
    if (!is_it || static_cast<std::size_t>(status.st_size) >= size_) return;
    user_error("'{}' has {}, but had {} when the run began; restore it and continue with --resume", path_,
               plural(status.st_size, "byte"), grouped(static_cast<std::int64_t>(size_)));
}

}  // namespace llmc
