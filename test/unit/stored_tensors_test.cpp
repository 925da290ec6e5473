// Where tensors lie in files of boxes: what does not cover a tensor once is refused.
#include "llmc/io/stored_tensors.h"

#include <gtest/gtest.h>
#include <stdlib.h>

#include <cstdint>
#include <filesystem>
#include <string>

#include "llmc/core/error.h"
#include "llmc/io/files.h"

namespace llmc {
namespace {

namespace fs = std::filesystem;

class BoxedFiles : public testing::Test {
  protected:
    BoxedFiles() {
        std::string name = (fs::temp_directory_path() / "llmc-boxes-XXXXXX").string();
        if (mkdtemp(name.data()) == nullptr) throw std::runtime_error("no temporary directory");
        folder = name;
    }
    ~BoxedFiles() override { fs::remove_all(folder); }

    // Writes a file with one box of the tensor "x".
    void write(const std::string& name, const std::string& shape, const std::string& offsets,
               std::uint64_t bytes, const std::string& of = "x") {
        std::string header = R"({"__metadata__":{"format":"pt","DCP_SHARDING_INFO":"{\")" + of +
                             R"(\":{\"saved_offsets\":)" + offsets + R"(}}"},"x":{"dtype":"F32","shape":)" +
                             shape + R"(,"data_offsets":[0,)" + std::to_string(bytes) + "]}}";
        const std::uint64_t size = header.size();
        std::string text(reinterpret_cast<const char*>(&size), sizeof(size));
        write_file(folder / name, text + header + std::string(bytes < 1000 ? bytes : 0, '\0'));
    }
    std::string error() const {
        try {
            find_tensors(folder);
        } catch (const UserError& fault) {
            return fault.what();
        }
        return "";
    }

    fs::path folder;
};

TEST_F(BoxedFiles, MakeAWholeTensor) {
    write("a.safetensors", "[1,3]", "[0,0]", 12);
    write("b.safetensors", "[2,1]", "[1,0]", 8);
    write("c.safetensors", "[2,2]", "[1,1]", 16);
    write("d.safetensors", "[0,3]", "[3,0]", 0);
    const StoredTensors found = StoredTensors::from_bytes(find_tensors(folder).to_bytes());
    ASSERT_EQ(found.tensors().size(), 1u);
    const StoredTensor& tensor = found.tensors().at("x");
    EXPECT_EQ(tensor.shape, (Shape{3, 3}));
    EXPECT_EQ(tensor.boxes.size(), 4u);
    EXPECT_EQ(found.files().size(), 4u);
    for (const StoredBox& box : tensor.boxes) {
        EXPECT_EQ(box.dtype, "F32");
        EXPECT_EQ(box.position + static_cast<std::uint64_t>(4 * box.shape.elements()),
                  found.files()[box.file].bytes);
    }
    EXPECT_TRUE(found.is_folder);
    EXPECT_FALSE(found.is_model);
}

TEST_F(BoxedFiles, WithAHoleAreRefused) {
    write("a.safetensors", "[1,3]", "[0,0]", 12);
    write("b.safetensors", "[2,2]", "[1,1]", 16);
    EXPECT_NE(error().find("of tensor \"x\", with the shape (3, 3), there are only 7 elements"),
              std::string::npos)
        << error();
}

TEST_F(BoxedFiles, ThatOverlapAreRefused) {
    write("a.safetensors", "[2,2]", "[0,0]", 16);
    write("b.safetensors", "[2,2]", "[1,1]", 16);  // 8 elements, of a whole of 9
    EXPECT_NE(error().find("the parts of tensor \"x\" in a.safetensors and b.safetensors overlap"),
              std::string::npos)
        << error();
    // Twice as many elements as the hole lacks.
    write("b.safetensors", "[2,2]", "[0,1]", 16);
    write("c.safetensors", "[1,1]", "[1,2]", 4);
    EXPECT_NE(error().find("overlap"), std::string::npos) << error();
}

TEST_F(BoxedFiles, WithoutPlacesAreRefused) {
    for (const char* const offsets : {"[0]", "[0,0,0]", "[0,-1]", "[0,1.5]", "[0,\\\"1\\\"]", "{}", "7",
                                      "null", "[0,9223372036854775807]", "[9223372036854775806,0]",
                                      "[0,9223372036854775808]", "[0,18446744073709551616]"}) {
        write("a.safetensors", "[2,2]", offsets, 16);
        EXPECT_NE(error().find("its place is no place"), std::string::npos) << offsets << ": " << error();
    }
    write("a.safetensors", "[2,2]", "[0,0]", 16, "y");
    EXPECT_NE(error().find("it has no place"), std::string::npos) << error();
}

TEST_F(BoxedFiles, OfSizesBeyondTheFileAreRefused) {
    for (const char* const shape :
         {"[9223372036854775807,1]", "[9223372036854775808,1]", "[4611686018427387904,2]",
          "[2147483648,4294967296]", "[18446744073709551615,1]",
          "[9223372036854775807,9223372036854775807]"}) {
        write("a.safetensors", shape, "[0,0]", 9223372036854775807U);
        EXPECT_NE(error().find("tensor \"x\""), std::string::npos) << shape << ": " << error();
    }
    // A place far away leaves a hole.
    write("a.safetensors", "[2,2]", "[4611686018427387904,4611686018427387904]", 16);
    EXPECT_NE(error().find("there are only 4 elements"), std::string::npos) << error();
}

TEST_F(BoxedFiles, OfOtherDimensionsAreRefused) {
    write("a.safetensors", "[2,2]", "[0,0]", 16);
    write("b.safetensors", "[2]", "[2]", 8);
    EXPECT_NE(error().find("1 dimension in this file, and 2 in"), std::string::npos) << error();
}

TEST_F(BoxedFiles, WhoseMetadataAreNoJsonAreRefused) {
    write("a.safetensors", "[2,2]", "[", 16);
    EXPECT_NE(error().find("its DCP_SHARDING_INFO is not a JSON object"), std::string::npos) << error();
}

}  // namespace
}  // namespace llmc
