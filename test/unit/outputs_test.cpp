// Before a run starts, the size of its outputs is compared with the free space on the disk.
#include "llmc/train/outputs.h"

#include <gtest/gtest.h>
#include <sys/statvfs.h>

#include <filesystem>
#include <string>

#include "llmc/core/error.h"

namespace llmc {
namespace {

namespace fs = std::filesystem;

const fs::path folder = fs::temp_directory_path() / "llmc_outputs_test";

// The message that refuses a run with this many parameters.
std::string refusal(const Options& options, std::uint64_t parameters) {
    try {
        check_outputs(options, folder, what_is_written(options, folder, options.steps > 0, false), {},
                      {.checkpoint = 12 * parameters, .weights = 4 * parameters});
        return "";
    } catch (const UserError& error) {
        return error.what();
    }
}

Options exporting(std::int64_t steps) {
    Options options;
    options.out_dir = folder;
    options.export_file = folder / "x.safetensors";
    options.steps = steps;
    return options;
}

TEST(CheckOutputs, WeighsAnExportThatIsAllThatIsWritten) {
    const std::string line = refusal(exporting(0), std::int64_t{1} << 58);
    EXPECT_EQ(line.find("--export: " + (folder / "x.safetensors").string() + " needs 1.0 EiB"), 0U) << line;
    EXPECT_EQ(refusal(exporting(0), 1), "");
}

TEST(CheckOutputs, WeighsAnExportBesideTheCheckpoint) {
    struct statvfs disk {};
    ASSERT_EQ(statvfs(fs::temp_directory_path().c_str(), &disk), 0);
    const auto available = static_cast<std::int64_t>(disk.f_bavail * disk.f_frsize);
    // A checkpoint has 12 bytes per parameter and an export 4: the disk has room for one of them, not both.
    const std::string line = refusal(exporting(1), available / 14);
    EXPECT_EQ(line.find("--export: "), 0U) << line;
    EXPECT_NE(line.find("and the checkpoint needs"), std::string::npos) << line;
    EXPECT_EQ(refusal(exporting(1), available / 24), "");
    EXPECT_EQ(refusal(exporting(1), available / 8).find("--out-dir: "), 0U);
}

}  // namespace
}  // namespace llmc
