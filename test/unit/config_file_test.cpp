// Configuration files: reading a written file gives the same values.
#include "llmc/train/config_file.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <string>

#include "llmc/io/files.h"

namespace llmc {
namespace {

namespace fs = std::filesystem;

class ConfigFile : public testing::Test {
  protected:
    ~ConfigFile() override { fs::remove(path_); }

    std::vector<ConfigSetting> read(const std::string& text) const {
        write_file(path_, text);
        return read_config_file(path_);
    }

  private:
    std::string path_ = fs::temp_directory_path() / ("llmc_config_file_test_" + std::to_string(getpid()));
};

TEST_F(ConfigFile, ReadsEveryText) {
    for (const std::string text :
         {"", "Once", "a \"b\" 'c'", "\\n", "\n\t\\", "# no comment", " = ", "\xc3\xa9", "\x01\x1b\x7f"}) {
        const auto settings = read("prompt = " + as_config_text(text) + "\n");
        ASSERT_EQ(settings.size(), 1U);
        EXPECT_EQ(settings[0].value, text);
        EXPECT_EQ(settings[0].type, ConfigType::text);
    }
}

TEST_F(ConfigFile, ReadsALongText) {
    std::string text;
    for (int i = 0; i < 100'000; ++i) text += "...\n'\"";
    const auto settings = read("prompt = " + as_config_text(text) + "\n");
    ASSERT_EQ(settings.size(), 1U);
    EXPECT_EQ(settings[0].value, text);
}

TEST_F(ConfigFile, ReadsSettingsWithTheirLines) {
    const auto settings = read("# mine\n\n  lr=1e-3 # fast\r\nmodel\t= 'a\\b'\nsteps = 4");
    ASSERT_EQ(settings.size(), 3U);
    EXPECT_EQ(settings[0].line, 3);
    EXPECT_EQ(settings[0].name, "lr");
    EXPECT_EQ(settings[0].value, "0.001");
    EXPECT_EQ(settings[0].type, ConfigType::number);
    EXPECT_EQ(settings[1].line, 4);
    EXPECT_EQ(settings[1].value, "a\\b");
    EXPECT_EQ(settings[2].line, 5);
    EXPECT_EQ(settings[2].value, "4");
}

}  // namespace
}  // namespace llmc
