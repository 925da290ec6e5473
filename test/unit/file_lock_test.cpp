// A lock that is a file. (Locks of two descriptors exclude each other in one process too.)
#include "llmc/io/file_lock.h"

#include <fmt/format.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <atomic>
#include <filesystem>
#include <fstream>
#include <string>
#include <thread>
#include <vector>

namespace llmc {
namespace {

namespace fs = std::filesystem;

class FileLocks : public testing::Test {
  protected:
    FileLocks() { fs::remove_all(folder); }
    ~FileLocks() override { fs::remove_all(folder); }

    const fs::path folder = fs::temp_directory_path() / fmt::format("llmc_file_lock_test-{}", getpid());
    const fs::path file = folder / "a/b/lock";
};

TEST_F(FileLocks, OneHoldsItAndOthersLearnWho) {
    const std::string name = fmt::format("process {} on machine ", getpid());
    EXPECT_FALSE(lock_holder(file));
    EXPECT_FALSE(fs::exists(folder));
    {
        const FileLock first(file);
        EXPECT_FALSE(first.holder()) << *first.holder();
        EXPECT_EQ(first.fault(), "");
        EXPECT_EQ(lock_holder(file).value_or("nobody").rfind(name, 0), 0U);
        EXPECT_EQ(FileLock(file).holder().value_or("nobody").rfind(name, 0), 0U);
        EXPECT_TRUE(lock_holder(file));  // neither question released it
    }
    EXPECT_FALSE(fs::exists(folder));
}

TEST_F(FileLocks, TheFileOfAKilledHolderLocksNothing) {
    fs::create_directories(file.parent_path());
    std::ofstream(file) << "process 12345 on machine somewhere-with-a-long-name\n";
    EXPECT_FALSE(lock_holder(file));
    {
        const FileLock lock(file);
        EXPECT_FALSE(lock.holder());
        EXPECT_EQ(lock_holder(file).value_or("").find("somewhere"), std::string::npos);
    }
    EXPECT_TRUE(fs::exists(file.parent_path()));  // it was there before
    EXPECT_FALSE(fs::exists(file));
}

TEST_F(FileLocks, AFolderThatGotFilesStays) {
    {
        const FileLock lock(file);
        std::ofstream(folder / "a/results") << "x";
    }
    EXPECT_TRUE(fs::exists(folder / "a/results"));
    EXPECT_FALSE(fs::exists(folder / "a/b"));
}

TEST_F(FileLocks, APlaceThatCannotBeWrittenHasAFault) {
    const FileLock lock("/proc/nothing/lock");
    EXPECT_FALSE(lock.holder());
    EXPECT_NE(lock.fault(), "");
}

TEST_F(FileLocks, NoTwoHoldItWhileItsFileComesAndGoes) {
    std::atomic<int> inside = 0, together = 0, taken = 0;
    const auto take_often = [&] {
        while (taken < 2000) {
            const FileLock lock(file);
            if (lock.holder() || !lock.fault().empty()) continue;
            if (++inside > 1) ++together;
            std::this_thread::yield();
            --inside;
            ++taken;
        }
    };
    std::vector<std::thread> threads;
    for (int i = 0; i < 4; ++i) threads.emplace_back(take_often);
    for (std::thread& thread : threads) thread.join();
    EXPECT_EQ(together, 0);
}

}  // namespace
}  // namespace llmc
