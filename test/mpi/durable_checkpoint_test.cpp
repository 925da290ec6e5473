// A checkpoint is on disk before it counts. A crash of the machine can lose what was written without fsync, so
// each file has to be synced before the folder gets its final name, and then the folder that holds the name.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "llmc/io/checkpoint.h"
#include "mpi_test.h"
#include "trainer_run.h"

namespace {

namespace fs = std::filesystem;

// The calls of this process, in their order: "sync FILE" and "rename FILE".
std::vector<std::string> calls;

}  // namespace

// These take the place of the C library's functions in this program. (Its headers have reserved names for the
// parameters.)
// NOLINTBEGIN(readability-inconsistent-declaration-parameter-name)
extern "C" int fsync(int descriptor) {
    std::error_code error;
    const fs::path file = fs::read_symlink("/proc/self/fd/" + std::to_string(descriptor), error);
    calls.push_back("sync " + file.filename().string());
    return static_cast<int>(syscall(SYS_fsync, descriptor));
}

extern "C" int rename(const char* from, const char* to) noexcept {
    calls.push_back("rename " + fs::path(to).filename().string());
    return static_cast<int>(syscall(SYS_renameat, AT_FDCWD, from, AT_FDCWD, to));
}
// NOLINTEND(readability-inconsistent-declaration-parameter-name)

namespace llmc {
namespace {

TEST(Checkpoint, IsOnDiskBeforeItHasItsName) {
    test::TrainerRun run({});
    Trainer& trainer = run.trainer();
    std::string folder = (fs::temp_directory_path() / "llmc-checkpoint-XXXXXX").string();
    ASSERT_NE(mkdtemp(folder.data()), nullptr);
    const fs::path out_dir = fs::path(folder) / "out";
    fs::create_directory(out_dir);

    calls.clear();
    const fs::path saved = save_checkpoint(out_dir, "run", "lineage", trainer.progress(), {}, "{}",
                                           trainer.algorithms(), trainer.store(), trainer.transfer());
    if (!trainer.transfer().is_root()) {
        EXPECT_EQ(calls, std::vector<std::string>());
        fs::remove_all(folder);
        return;
    }
    const std::string name = saved.filename().string();
    const auto place = [](const std::string& call) { return std::ranges::find(calls, call) - calls.begin(); };
    const auto renamed = place("rename " + name);
    for (const fs::directory_entry& file : fs::directory_iterator(saved)) {
        const std::string stem = file.path().filename().string();
        const auto synced = std::ranges::find_if(
            calls, [&](const std::string& call) { return call.starts_with("sync " + stem); });
        EXPECT_LT(synced - calls.begin(), renamed) << stem;
    }
    EXPECT_LT(place("sync " + name + ".partial"), renamed);
    EXPECT_EQ(renamed + 1, place("sync out"));
    EXPECT_EQ(place("sync out") + 1, std::ssize(calls)) << ::testing::PrintToString(calls);
    fs::remove_all(folder);
}

}  // namespace
}  // namespace llmc
