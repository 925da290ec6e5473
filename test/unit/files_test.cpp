// Checks of the disk before a run writes to it.
#include "llmc/io/files.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <string>

#include "llmc/core/error.h"

namespace llmc {
namespace {

TEST(RequireSpace, ComparesWithWhatTheDiskHas) {
    const std::filesystem::path folder = std::filesystem::temp_directory_path();
    require_space(folder, 1);
    require_space(folder / "not" / "there", 1);
    try {
        require_space(folder / "not" / "there", std::uint64_t{1} << 60);
        ADD_FAILURE() << "no disk has an exbibyte";
    } catch (const UserError& error) {
        const std::string line = error.what();
        EXPECT_NE(line.find((folder / "not" / "there").string() + " needs 1.0 EiB"), std::string::npos)
            << line;
    }
}

TEST(RequireWritable, LeavesNothingBehind) {
    const std::filesystem::path folder = std::filesystem::temp_directory_path() / "llmc_files_test";
    std::filesystem::create_directory(folder);
    require_writable_directory(folder);
    require_writable_directory(folder / "a" / "b");
    require_writable_file(folder / "a" / "b");
    require_replaceable_file(folder / "c");
    EXPECT_TRUE(std::filesystem::is_empty(folder));
    std::filesystem::remove_all(folder);
}

}  // namespace
}  // namespace llmc
