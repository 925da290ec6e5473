// Files of data, and what a run makes of them, for tests.
#pragma once

#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdint>
#include <filesystem>
#include <fstream>
#include <functional>
#include <initializer_list>
#include <string>
#include <string_view>
#include <vector>

#include "llmc/core/error.h"
#include "llmc/data/data.h"
#include "llmc/data/token_source.h"

namespace llmc {

// A folder of files, removed at the end of the test.
class DataFiles : public testing::Test {
  protected:
    DataFiles() { std::filesystem::create_directories(folder_); }
    ~DataFiles() override { std::filesystem::remove_all(folder_); }

    std::string path(const std::string& name) const { return (folder_ / name).string(); }

    std::string write(const std::string& name, std::string_view bytes) const {
        std::ofstream(path(name), std::ios::binary).write(bytes.data(), std::ssize(bytes));
        return path(name);
    }

    // A file with these values as its header, followed by these tokens.
    template <class Token>
    std::string write_shard(const std::string& name, std::vector<std::int32_t> header,
                            const std::vector<Token>& tokens) const {
        header.resize(256);
        std::string bytes(reinterpret_cast<const char*>(header.data()), 1024);
        bytes.append(reinterpret_cast<const char*>(tokens.data()), tokens.size() * sizeof(Token));
        return write(name, bytes);
    }
    std::string write_shard16(const std::string& name, const std::vector<std::uint16_t>& tokens) const {
        return write_shard(name, {20240520, 1, static_cast<std::int32_t>(tokens.size())}, tokens);
    }
    std::string write_shard32(const std::string& name, const std::vector<std::uint32_t>& tokens) const {
        return write_shard(name, {20240801, 7, static_cast<std::int32_t>(tokens.size())}, tokens);
    }

  private:
    std::filesystem::path folder_ =
        std::filesystem::temp_directory_path() / ("llmc_data_files_" + std::to_string(getpid()));
};

// The message of a UserError: one line that contains all these parts.
inline void expect_refused(const std::function<void()>& f, std::initializer_list<std::string> parts) {
    try {
        f();
        ADD_FAILURE() << "not refused";
    } catch (const UserError& error) {
        const std::string message = error.what();
        EXPECT_EQ(message.find('\n'), message.npos) << message;
        for (const std::string& part : parts)
            EXPECT_NE(message.find(part), message.npos) << part << " is not in: " << message;
    }
}

inline std::vector<std::int32_t> read_all(const TokenSource& source, std::size_t shard) {
    std::vector<std::int32_t> tokens(static_cast<std::size_t>(source.tokens(shard)));
    source.read(shard, 0, tokens);
    return tokens;
}

inline Data open(const std::string& train, const std::string& val = "", std::int64_t vocabulary = 256,
                 std::int64_t T = 1) {
    return open_data({.train_data = train, .val_data = val, .vocabulary = vocabulary, .sequence_length = T});
}

}  // namespace llmc
