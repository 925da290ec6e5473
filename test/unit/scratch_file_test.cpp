// The file for what does not fit into memory: transfers, and what it refuses.
#include "llmc/core/scratch_file.h"

#include <gtest/gtest.h>
#include <sys/resource.h>
#include <unistd.h>

#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "llmc/core/error.h"

namespace llmc {
namespace {

namespace fs = std::filesystem;

struct Folder {
    fs::path path = fs::temp_directory_path() / ("scratch-file-test-" + std::to_string(getpid()));
    ~Folder() { fs::remove_all(path); }
};

struct Free {
    void operator()(std::byte* memory) const { std::free(memory); }
};
using Memory = std::unique_ptr<std::byte[], Free>;

Memory aligned(std::size_t bytes) {
    return Memory(static_cast<std::byte*>(std::aligned_alloc(ScratchFile::alignment, bytes)));
}

std::byte pattern(std::size_t i, int seed) {
    return static_cast<std::byte>((i * 2654435761U >> 11) + i + static_cast<std::size_t>(seed));
}

// Of more than one request of 1 MiB, the last of which is short.
constexpr std::size_t large = (std::size_t{5} << 19) + ScratchFile::alignment;

TEST(ScratchFile, GivesBackWhatWasWritten) {
    const Folder folder;
    ScratchFile file((folder.path / "made").string(), 3 * large, "");
    const Memory memory = aligned(large), again = aligned(large);
    for (const int seed : {1, 2}) {
        for (std::size_t i = 0; i < large; ++i) memory[i] = pattern(i, seed);
        file.wait(file.begin_write(large, memory.get(), large));
        const int reading = file.begin_read(large, again.get(), large);
        while (!file.is_done(reading)) std::this_thread::yield();
        for (std::size_t i = 0; i < large; ++i) ASSERT_EQ(again[i], pattern(i, seed)) << i;
    }
    file.wait(file.begin_read(2 * large, again.get(), large));
    for (std::size_t i = 0; i < large; ++i) ASSERT_EQ(again[i], std::byte{0}) << i;
    EXPECT_TRUE(fs::is_empty(folder.path / "made")) << "the file has no name";
}

TEST(ScratchFile, TransfersRunAtOnce) {
    const Folder folder;
    ScratchFile file(folder.path.string(), 8 * large, "");
    std::vector<Memory> memory;
    std::vector<int> writing, reading;
    for (int part = 0; part < 8; ++part) {
        memory.push_back(aligned(large));
        for (std::size_t i = 0; i < large; ++i) memory.back()[i] = pattern(i, part);
        writing.push_back(
            file.begin_write(static_cast<std::size_t>(part) * large, memory.back().get(), large));
    }
    for (const int transfer : writing) file.wait(transfer);
    for (int part = 0; part < 8; ++part)
        reading.push_back(file.begin_read(static_cast<std::size_t>(7 - part) * large,
                                          memory[static_cast<std::size_t>(part)].get(), large));
    for (const int transfer : reading) file.wait(transfer);
    for (int part = 0; part < 8; ++part)
        for (std::size_t i = 0; i < large; ++i)
            ASSERT_EQ(memory[static_cast<std::size_t>(part)][i], pattern(i, 7 - part)) << part << " " << i;
}

std::string error_of(const std::string& directory, std::uint64_t bytes) {
    try {
        const ScratchFile file(directory, bytes, "");
    } catch (const UserError& error) {
        return error.what();
    }
    return "none";
}

TEST(ScratchFile, NamesWhyItCannotBeMade) {
    const Folder folder;
    fs::create_directories(folder.path);
    EXPECT_NE(error_of("/dev/null/x", 1).find("--nvme-dir /dev/null/x: cannot make the directory: "),
              std::string::npos);
    EXPECT_NE(error_of("/proc/self", 1).find("--nvme-dir /proc/self: cannot make a file: "),
              std::string::npos);
    const std::string lacks = error_of(folder.path.string(), std::uint64_t{1} << 60);
    EXPECT_NE(lacks.find("no file of 1.0 EiB: "), std::string::npos) << lacks;
    EXPECT_NE(lacks.find(" are available there"), std::string::npos) << lacks;
    if (fs::is_directory("/dev/shm")) {
        EXPECT_NE(error_of("/dev/shm", 1).find("lies in memory (tmpfs)"), std::string::npos);
    }
}

// Writes up to the limit of a file's size, which a process meets as it meets the end of a disk, and beyond it.
[[noreturn]] void write_too_much(const std::string& directory) {
    ScratchFile file(directory, 2 * large, "--offload-optimizer none");
    std::signal(SIGXFSZ, SIG_IGN);
    const rlimit limit{large, large};
    setrlimit(RLIMIT_FSIZE, &limit);
    const Memory memory = aligned(large);
    std::memset(memory.get(), 1, large);
    file.wait(file.begin_write(0, memory.get(), large));
    try {
        file.wait(file.begin_write(large, memory.get(), large));
    } catch (const UserError& error) {
        std::fprintf(stderr, "%s\n", error.what());
        std::exit(3);
    }
    std::exit(0);
}

TEST(ScratchFile, AWriteThatFailsIsOneLine) {
    const Folder folder;
    GTEST_FLAG_SET(death_test_style, "threadsafe");
    EXPECT_EXIT(write_too_much(folder.path.string()), testing::ExitedWithCode(3),
                "--nvme-dir .*: cannot write what is offloaded: File too large; start again or resume with "
                "another directory, or with --offload-optimizer none");
}

TEST(ScratchFile, MustBeAligned) {
    const Folder folder;
    ScratchFile file(folder.path.string(), large, "");
    const Memory memory = aligned(large);
    EXPECT_THROW(file.begin_read(1, memory.get(), ScratchFile::alignment), ProgrammingError);
    EXPECT_THROW(file.begin_read(0, memory.get() + 512, ScratchFile::alignment), ProgrammingError);
    EXPECT_THROW(file.begin_read(0, memory.get(), 100), ProgrammingError);
}

}  // namespace
}  // namespace llmc
