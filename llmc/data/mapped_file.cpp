#include "llmc/data/mapped_file.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <system_error>

#include "llmc/core/error.h"

namespace llmc {
namespace {

// Closes the file at the end of the scope; a mapping stays without it.
struct FileDescriptor {
    int fd;
    ~FileDescriptor() {
        if (fd >= 0) close(fd);
    }
};

[[noreturn]] void cannot_read(const std::string& path, const std::string& option, int error) {
    user_error("{}: cannot read '{}': {}; give a file that can be read", option, path,
               std::generic_category().message(error));
}

}  // namespace

MappedFile::MappedFile(const std::string& path, const std::string& option) {
    // Without O_NONBLOCK opening a named pipe would wait for its writer.
    const FileDescriptor file{open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK)};
    if (file.fd < 0 && errno == ENOENT) {
        user_error("{}: there is no file '{}'; give a text file, or token shards as 'PATTERN*.bin' in quotes",
                   option, path);
    }
    struct stat status {};
    if (file.fd < 0 || fstat(file.fd, &status) != 0) cannot_read(path, option, errno);
    if (S_ISDIR(status.st_mode)) {
        user_error("{}: '{}' is a directory; give a file in it, or its token shards as '{}/*.bin' in quotes",
                   option, path, path);
    }
    if (!S_ISREG(status.st_mode)) {
        user_error("{}: '{}' is not a regular file, which is read again and again; give one", option, path);
    }
    size_ = static_cast<std::size_t>(status.st_size);
    if (size_ == 0) user_error("{}: '{}' is empty; give a file with something to learn", option, path);

    void* mapping = mmap(nullptr, size_, PROT_READ, MAP_SHARED, file.fd, 0);
    if (mapping == MAP_FAILED) cannot_read(path, option, errno);
    data_ = static_cast<const std::uint8_t*>(mapping);
}

MappedFile::~MappedFile() { munmap(const_cast<std::uint8_t*>(data_), size_); }

}  // namespace llmc
