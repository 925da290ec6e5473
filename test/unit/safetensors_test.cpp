// The safetensors reader and writer. Reading returns what was written, and every dtype is converted exactly.
// A damaged file leads to an error, or to what the damaged bytes say, and to nothing else.
#include "llmc/io/safetensors.h"

#include <gtest/gtest.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <csignal>
#include <fstream>
#include <limits>
#include <optional>

#include "llmc/core/error.h"

namespace llmc {
namespace {

// The message of the UserError that `action` throws, or "" if it throws none.
template <class Action>
std::string message_of(Action action) {
    try {
        action();
    } catch (const UserError& error) {
        return error.what();
    }
    return "";
}

testing::AssertionResult contains(const std::string& text, const std::string& part) {
    if (text.find(part) != std::string::npos) return testing::AssertionSuccess();
    return testing::AssertionFailure() << "'" << text << "' does not contain '" << part << "'";
}

class SafetensorsTest : public testing::Test {
  protected:
    SafetensorsTest()
        : directory_(std::filesystem::temp_directory_path() / fmt::format("safetensors_test_{}", getpid())) {
        std::filesystem::create_directories(directory_);
    }
    ~SafetensorsTest() override { std::filesystem::remove_all(directory_); }

    std::filesystem::path path(const std::string& name = "model.safetensors") const {
        return directory_ / name;
    }

    std::filesystem::path write_file(const std::string& content) const {
        std::ofstream(path("file"), std::ios::binary) << content;
        return path("file");
    }

    // A file with this header and `data_bytes` zero bytes of data.
    std::filesystem::path write_header(const std::string& header, std::size_t data_bytes) const {
        const std::uint64_t length = header.size();
        return write_file(std::string(reinterpret_cast<const char*>(&length), sizeof(length)) + header +
                          std::string(data_bytes, '\0'));
    }

    // The message of the UserError that reading the header throws, or "" if none.
    std::string refusal(const std::string& header, std::size_t data_bytes) const {
        return message_of([&] { SafetensorsReader reader(write_header(header, data_bytes)); });
    }

  private:
    std::filesystem::path directory_;
};

template <class T>
std::span<const std::byte> bytes_of(const std::vector<T>& values) {
    return std::as_bytes(std::span(values));
}

std::vector<double> read_doubles(const SafetensorsReader& reader, const std::string& name) {
    std::vector<double> values(static_cast<std::size_t>(reader.entry(name).shape.elements()));
    reader.read(name, std::span(values));
    return values;
}

std::string read_file(const std::filesystem::path& path) {
    std::ifstream file(path, std::ios::binary);
    return {std::istreambuf_iterator<char>(file), {}};
}

TEST_F(SafetensorsTest, ReadsWhatItWrote) {
    const std::vector<float> weights = {1.5f, -2.25f, 3e-40f, std::numeric_limits<float>::infinity(),
                                        0.1f, -0.0f};
    const std::vector<double> exact = {0.1, 1e300};
    const std::vector<std::int64_t> counts = {-1, 1LL << 40, 7};
    SafetensorsWriter writer(path(),
                             {{"weights", "F32", {2, 3}},
                              {"empty", "F32", {0, 4}},
                              {"exact", "F64", {2}},
                              {"counts", "I64", {3}},
                              {"scalar", "BF16", {}}},
                             {{"step", "12"}});
    const auto bytes = bytes_of(weights);
    writer.append("weights", bytes.first(5));  // pieces need not be whole elements
    writer.append("weights", bytes.subspan(5));
    writer.append("exact", bytes_of(exact));
    writer.append("counts", bytes_of(counts));
    const bfloat16 scalar = to_bfloat16(-3.0f);
    writer.append("scalar", std::as_bytes(std::span(&scalar, 1)));
    EXPECT_FALSE(std::filesystem::exists(path())) << "the file has its name before it is whole";
    writer.finish(true);

    const SafetensorsReader reader(path());
    std::vector<std::string> names;
    for (const SafetensorsEntry& entry : reader.entries()) names.push_back(entry.name);
    EXPECT_EQ(names, (std::vector<std::string>{"weights", "empty", "exact", "counts", "scalar"}));
    EXPECT_EQ(reader.metadata().at("format"), "pt");
    EXPECT_EQ(reader.metadata().at("step"), "12");
    EXPECT_EQ(reader.entry("weights").shape, (Shape{2, 3}));
    EXPECT_EQ(reader.entry("empty").shape, (Shape{0, 4}));
    EXPECT_EQ(reader.entry("scalar").shape, Shape{});
    EXPECT_EQ(reader.entry("counts").dtype, "I64");

    std::vector<float> floats(6);
    reader.read("weights", std::span(floats));
    EXPECT_TRUE(std::ranges::equal(bytes_of(floats), bytes_of(weights)));
    EXPECT_EQ(read_doubles(reader, "exact"), exact);
    std::vector<float> rounded(2);
    reader.read("exact", std::span(rounded));
    EXPECT_EQ(rounded, (std::vector{0.1f, std::numeric_limits<float>::infinity()}));
    EXPECT_EQ(read_doubles(reader, "scalar"), std::vector{-3.0});
    EXPECT_EQ(read_doubles(reader, "empty"), std::vector<double>{});
    std::vector<std::int64_t> integers(3);
    reader.read("counts", std::as_writable_bytes(std::span(integers)));
    EXPECT_EQ(integers, counts);

    EXPECT_FALSE(reader.contains("bias"));
    EXPECT_THROW(reader.entry("bias"), UserError);
    EXPECT_THROW(read_doubles(reader, "counts"), UserError) << "integers are not read as floats";
    // The data begin at a multiple of 8 bytes.
    EXPECT_EQ((read_file(path()).size() - 24 - 16 - 24 - 2) % 8, 0u);
}

// A tensor larger than the reader converts at once.
TEST_F(SafetensorsTest, ReadsALargeTensor) {
    std::vector<float> values(700'001);
    for (std::size_t i = 0; i < values.size(); ++i) values[i] = static_cast<float>(i) * 0.5f;
    SafetensorsWriter writer(path(), {{"x", "F32", {700'001}}});
    writer.append("x", bytes_of(values));
    writer.finish();
    std::vector<float> read(values.size());
    SafetensorsReader(path()).read("x", std::span(read));
    EXPECT_EQ(read, values);
}

// All 2^16 halves, against the definition: (-1)^s 2^(e-15) 1.m, or (-1)^s 2^-14 0.m if e = 0.
TEST_F(SafetensorsTest, ConvertsEveryHalf) {
    std::vector<std::uint16_t> halves(1 << 16);
    for (std::size_t i = 0; i < halves.size(); ++i) halves[i] = static_cast<std::uint16_t>(i);
    SafetensorsWriter writer(path(), {{"x", "F16", {1 << 16}}});
    writer.append("x", bytes_of(halves));
    writer.finish();
    const std::vector<double> values = read_doubles(SafetensorsReader(path()), "x");
    for (int i = 0; i < 1 << 16; ++i) {
        const int sign = i >> 15, exponent = (i >> 10) & 31, significand = i & 1023;
        double expected =
            exponent == 0 ? std::ldexp(significand, -24) : std::ldexp(1024 + significand, exponent - 25);
        if (exponent == 31) expected = significand == 0 ? std::numeric_limits<double>::infinity() : NAN;
        const double value = values[static_cast<std::size_t>(i)];
        ASSERT_TRUE(std::isnan(expected) ? std::isnan(value) : value == (sign ? -expected : expected)) << i;
        ASSERT_EQ(std::signbit(value), sign == 1) << i;
    }
}

TEST_F(SafetensorsTest, RefusesWhatIsNoSafetensorsFile) {
    EXPECT_THROW(SafetensorsReader(path("missing")), UserError);
    EXPECT_THROW(SafetensorsReader(path("missing").parent_path()), UserError) << "a directory";
    EXPECT_THROW(SafetensorsReader(write_file("")), UserError);
    EXPECT_THROW(SafetensorsReader(write_file("1234567")), UserError);
    EXPECT_THROW(SafetensorsReader(write_file(std::string(100, '\xff'))), UserError);
    EXPECT_THROW(SafetensorsReader(write_file("PK\3\4 a zip archive, as PyTorch's own files are")),
                 UserError);
}

TEST_F(SafetensorsTest, NamesWhatIsWrong) {
    const std::string good = R"({"x":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}})";
    EXPECT_EQ(refusal(good, 8), "");
    EXPECT_TRUE(contains(refusal(good, 7), "tensor \"x\": its data end at 8"));
    EXPECT_TRUE(contains(refusal(good, 9), "the file holds 9 bytes"));
    EXPECT_TRUE(contains(refusal(good.substr(1), 8), "not JSON"));
    EXPECT_TRUE(contains(refusal("[]", 0), "the header is not a JSON object"));
    EXPECT_TRUE(contains(refusal(R"({"x":3})", 0), "needs dtype"));
    EXPECT_TRUE(contains(refusal(R"({"x":{"dtype":"F33","shape":[2],"data_offsets":[0,8]}})", 8), "dtype"));
    EXPECT_TRUE(contains(refusal(R"({"x":{"dtype":"F32","shape":[2.0],"data_offsets":[0,8]}})", 8), "shape"));
    EXPECT_TRUE(contains(refusal(R"({"x":{"dtype":"F32","shape":[-2],"data_offsets":[0,8]}})", 8), "shape"));
    EXPECT_TRUE(contains(refusal(R"({"x":{"dtype":"F32","shape":[1,1,1,1,1,2],"data_offsets":[0,8]}})", 8),
                         "dimensions"));
    EXPECT_TRUE(contains(refusal(R"({"x":{"dtype":"F32","shape":[3],"data_offsets":[0,8]}})", 8),
                         "do not match its shape"));
    EXPECT_TRUE(contains(refusal(R"({"x":{"dtype":"F32","shape":[2],"data_offsets":[8,0]}})", 8),
                         "do not match its shape"));
    EXPECT_TRUE(
        contains(refusal(R"({"x":{"dtype":"F32","shape":[2],"data_offsets":[0,8,8]}})", 8), "data_offsets"));
    EXPECT_TRUE(
        contains(refusal(R"({"a\nb":{"dtype":"F33","shape":[2],"data_offsets":[0,8]}})", 8), R"("a\nb")"))
        << "the message stays on one line";
    EXPECT_TRUE(contains(refusal(R"({"__metadata__":{"step":12}})", 0), "\"step\" is not a string"));
    // 2^31 x 2^31 elements of 4 bytes are 2^64 bytes: 0, if the product wrapped around.
    EXPECT_TRUE(
        contains(refusal(R"({"x":{"dtype":"F32","shape":[2147483648,2147483648],"data_offsets":[0,0]}})", 0),
                 "too large"));
    EXPECT_TRUE(contains(
        refusal(R"({"x":{"dtype":"U8","shape":[18446744073709551615],"data_offsets":[0,8]}})", 8), "shape"));
    const std::string twice = R"("x":{"dtype":"F32","shape":[2],"data_offsets":[0,8]})";
    EXPECT_TRUE(contains(refusal("{" + twice + "," + twice + "}", 8), "\"x\" occurs twice"));
    EXPECT_TRUE(contains(
        refusal(R"({"x":{"dtype":"F64","dtype":"F32","shape":[2],"data_offsets":[0,8]}})", 8), "twice"));
    EXPECT_TRUE(contains(refusal(R"({"x":)" + std::string(100'000, '['), 8), "nested"));
    const auto two = [](const char* first, const char* second) {
        return fmt::format(R"({{"x":{{"dtype":"F32","shape":[2],"data_offsets":{}}},)"
                           R"("y":{{"dtype":"F32","shape":[2],"data_offsets":{}}}}})",
                           first, second);
    };
    EXPECT_EQ(refusal(two("[8,16]", "[0,8]"), 16), "") << "the header's order is free";
    EXPECT_TRUE(contains(refusal(two("[0,8]", "[4,12]"), 12), "begin at 4")) << "overlap";
    EXPECT_TRUE(contains(refusal(two("[0,8]", "[12,20]"), 20), "begin at 12")) << "gap";
}

// The contents of a file, apart from names: everything that a user of the reader relies on.
struct Contents {
    std::vector<SafetensorsEntry> entries;
    std::vector<std::string> data;
};

// Reads everything that the reader offers. Returns nothing if the file is refused. Any other exception fails
// the test.
std::optional<Contents> read_all(const std::filesystem::path& path) {
    try {
        const SafetensorsReader reader(path);
        Contents contents{reader.entries(), {}};
        for (const SafetensorsEntry& entry : contents.entries) {
            std::string data(entry.bytes(), '\0');
            reader.read(entry.name, std::as_writable_bytes(std::span(data)));
            contents.data.push_back(data);
            std::vector<float> floats(static_cast<std::size_t>(entry.shape.elements()));
            try {
                reader.read(entry.name, std::span(floats));
            } catch (const UserError&) {  // its dtype is no longer a floating-point dtype
            }
        }
        return contents;
    } catch (const UserError& error) {
        EXPECT_EQ(std::string_view(error.what()).find('\n'), std::string_view::npos) << error.what();
        return std::nullopt;
    }
}

// Each byte of a small file in turn takes every other value. The reader refuses the file, or gives tensors of
// the same number, shapes and bytes. A changed letter may only change a name, a metadata text, a dtype (to
// another of the same size), or its own element.
TEST_F(SafetensorsTest, SurvivesEveryDamagedByte) {
    const std::vector<float> x = {1.0f, 2.0f, 3.0f, 4.0f, 5.0f, 6.0f};
    const std::vector<std::uint16_t> y = {0x3f80, 0x4000};
    SafetensorsWriter writer(path(), {{"x", "F32", {2, 3}}, {"wpe.y", "BF16", {2}}});
    writer.append("x", bytes_of(x));
    writer.append("wpe.y", bytes_of(y));
    writer.finish();
    const std::string file = read_file(path());
    const std::size_t data_begin = file.size() - 28;
    const Contents whole = read_all(path()).value();

    std::fstream damaged(write_file(file), std::ios::in | std::ios::out | std::ios::binary);
    const auto put = [&](std::size_t i, char byte) {
        damaged.seekp(static_cast<std::streamoff>(i));
        damaged.put(byte).flush();
    };
    int refused = 0, accepted = 0;
    for (std::size_t i = 0; i < file.size(); ++i) {
        for (int change = 1; change < 256; ++change) {
            put(i, static_cast<char>(file[i] ^ change));
            const auto contents = read_all(path("file"));
            ++(contents ? accepted : refused);
            ASSERT_TRUE(contents || i < data_begin) << "the format has no checksum";
            if (!contents) continue;
            ASSERT_EQ(contents->entries.size(), whole.entries.size()) << i << " " << change;
            std::string data, expected = file.substr(data_begin);
            if (i >= data_begin) expected[i - data_begin] = static_cast<char>(file[i] ^ change);
            for (std::size_t k = 0; k < whole.entries.size(); ++k) {
                ASSERT_EQ(contents->entries[k].shape, whole.entries[k].shape) << i << " " << change;
                data += contents->data[k];
            }
            ASSERT_EQ(data, expected) << i << " " << change;
        }
        put(i, file[i]);
    }
    EXPECT_GT(refused, 10'000);
    EXPECT_GT(accepted, 28 * 255);
}

TEST_F(SafetensorsTest, RefusesAFileCutAnywhere) {
    SafetensorsWriter writer(path(), {{"x", "F32", {3}}});
    writer.append("x", bytes_of(std::vector<float>{1.0f, 2.0f, 3.0f}));
    writer.finish();
    const std::string file = read_file(path());
    for (std::size_t length = 0; length < file.size(); ++length)
        EXPECT_FALSE(read_all(write_file(file.substr(0, length)))) << length;
    EXPECT_FALSE(read_all(write_file(file + '\0'))) << "a byte too many";
}

TEST_F(SafetensorsTest, ReportsAFileCutWhileOpen) {
    SafetensorsWriter writer(path(), {{"x", "F32", {3}}});
    writer.append("x", bytes_of(std::vector<float>{1.0f, 2.0f, 3.0f}));
    writer.finish();
    const SafetensorsReader reader(path());
    std::filesystem::resize_file(path(), std::filesystem::file_size(path()) - 1);
    std::vector<float> values(3);
    EXPECT_THROW(reader.read("x", std::span(values)), UserError);
}

TEST_F(SafetensorsTest, ReportsWhyItCannotWrite) {
    const auto message =
        message_of([&] { SafetensorsWriter writer(path("no directory") / "x.safetensors", {}); });
    EXPECT_TRUE(contains(message, "No such file or directory"));
}

// A limit on the size of files simulates a full disk, which a test cannot create.
TEST_F(SafetensorsTest, ReportsAFullDiskAndLeavesNothingBehind) {
    rlimit old{};
    ASSERT_EQ(getrlimit(RLIMIT_FSIZE, &old), 0);
    const rlimit small{4096, old.rlim_max};
    const auto old_handler = std::signal(SIGXFSZ, SIG_IGN);
    ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &small), 0);
    const std::string message = message_of([&] {
        const std::vector<float> values(100'000);
        SafetensorsWriter writer(path(), {{"x", "F32", {100'000}}});
        writer.append("x", bytes_of(values));
        writer.finish();
    });
    setrlimit(RLIMIT_FSIZE, &old);
    std::signal(SIGXFSZ, old_handler);
    EXPECT_TRUE(contains(message, "File too large"));
    EXPECT_TRUE(std::filesystem::is_empty(path().parent_path()));
}

TEST_F(SafetensorsTest, AnUnfinishedFileLeavesTheOldOne) {
    {
        SafetensorsWriter writer(path(), {{"old", "F32", {1}}});
        writer.append("old", bytes_of(std::vector<float>{1.0f}));
        writer.finish();
        SafetensorsWriter unfinished(path(), {{"new", "F32", {1}}});
    }
    EXPECT_TRUE(SafetensorsReader(path()).contains("old"));
    EXPECT_EQ(std::distance(std::filesystem::directory_iterator(path().parent_path()), {}), 1);
}

TEST_F(SafetensorsTest, MisuseIsAProgrammingError) {
    const std::vector<float> two(2);
    SafetensorsWriter writer(path(), {{"x", "F32", {1}}, {"y", "F32", {2}}});
    EXPECT_THROW(writer.append("y", bytes_of(two)), ProgrammingError) << "out of order";
    EXPECT_THROW(writer.append("x", bytes_of(two)), ProgrammingError) << "too many bytes";
    EXPECT_THROW(writer.finish(), ProgrammingError) << "too few";
    EXPECT_THROW(SafetensorsWriter(path(), {{"x", "F31", {1}}}), ProgrammingError);
    EXPECT_THROW(SafetensorsWriter(path(), {{"x", "F32", {1}}, {"x", "F32", {1}}}), ProgrammingError);
}

}  // namespace
}  // namespace llmc
