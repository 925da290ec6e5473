#include "llmc/io/model_files.h"

#include <algorithm>
#include <cmath>
#include <set>
#include <span>
#include <string>
#include <vector>

#include "llmc/core/error.h"
#include "llmc/core/text.h"
#include "llmc/io/safetensors.h"

namespace llmc {

namespace {

using Flat = Tensor UnitBuffers<Tensor>::*;

// One kind of tensor in a file: which of a unit's flat buffers, and what is added to the tensor's name.
struct Kind {
    Flat flat;
    const char* suffix;
};
constexpr Kind weights{&UnitBuffers<Tensor>::master, ""};
constexpr Kind first_moment{&UnitBuffers<Tensor>::m, ".exp_avg"};
constexpr Kind second_moment{&UnitBuffers<Tensor>::v, ".exp_avg_sq"};

constexpr std::string_view prefix = "transformer.";
constexpr std::string_view head_name = "lm_head.weight";

Shape file_shape(const ParamSpec& spec) {
    const std::int64_t columns = spec.shape.last();
    const std::int64_t rows = spec.shape.elements() / columns;
    return spec.transposed_in_files ? Shape{columns, rows} : spec.shape;
}

// to (columns, rows) = the transpose of from (rows, columns).
void transpose(std::span<float> to, std::span<const float> from, std::int64_t rows, std::int64_t columns) {
#pragma omp parallel for
    for (std::int64_t j = 0; j < columns; ++j) {
        for (std::int64_t i = 0; i < rows; ++i) {
            to[static_cast<std::size_t>(j * rows + i)] = from[static_cast<std::size_t>(i * columns + j)];
        }
    }
}

std::span<float> tensor_of(std::span<float> flat, const UnitLayout::Entry& entry) {
    return flat.subspan(static_cast<std::size_t>(entry.offset),
                        static_cast<std::size_t>(entry.spec.shape.elements()));
}

void save(const std::filesystem::path& file, Device& device, const ParameterStore& store,
          std::span<const Kind> kinds, bool sync) {
    std::vector<SafetensorsEntry> table;
    for (const Kind& kind : kinds) {
        for (int unit = 0; unit < store.units(); ++unit) {
            for (const UnitLayout::Entry& entry : store.layout(unit).entries()) {
                table.push_back(
                    {store.layout(unit).full_name(entry.spec) + kind.suffix, "F32", file_shape(entry.spec)});
            }
        }
    }
    SafetensorsWriter writer(file, table);
    std::vector<float> flat, transposed;
    for (const Kind& kind : kinds) {
        for (int unit = 0; unit < store.units(); ++unit) {
            const Tensor& buffer = store.buffers(unit).*kind.flat;
            flat.resize(static_cast<std::size_t>(buffer.elements()));
            device.download(flat.data(), buffer);
            for (const UnitLayout::Entry& entry : store.layout(unit).entries()) {
                std::span<const float> values = tensor_of(flat, entry);
                if (entry.spec.transposed_in_files) {
                    const std::int64_t columns = entry.spec.shape.last();
                    transposed.resize(values.size());
                    transpose(transposed, values, entry.spec.shape.elements() / columns, columns);
                    values = transposed;
                }
                writer.append(store.layout(unit).full_name(entry.spec) + kind.suffix, std::as_bytes(values));
            }
        }
    }
    writer.finish(sync);
}

// The name under which a file holds a tensor, with or without the prefix.
std::string name_in(const SafetensorsReader& reader, const std::string& name) {
    const std::string prefixed = std::string(prefix) + name;
    return reader.contains(prefixed) ? prefixed : name;
}

// A weight that is not finite would make every loss nan.
void check_finite(const std::filesystem::path& file, const std::string& name, std::span<const float> values,
                  const Shape& shape) {
    const auto found = std::ranges::find_if(values, [](float x) { return !std::isfinite(x); });
    if (found == values.end()) return;
    std::int64_t rest = found - values.begin();
    std::string index;
    for (int i = shape.dimensions() - 1; i >= 0; --i) {
        index = fmt::format("{}{}{}", rest % shape[i], index.empty() ? "" : ", ", index);
        rest /= shape[i];
    }
    user_error("{}: {} is not finite ({} at ({})): no step from step 1 on would have a finite loss",
               file.string(), name, *found, index);
}

void check_shape(const std::filesystem::path& file, const SafetensorsReader& reader, const std::string& name,
                 const Shape& expected) {
    const Shape found = reader.entry(name).shape;
    if (found == expected) return;
    user_error("{}: {} has the shape {}, this model needs {}; give the sizes of the file's model",
               file.string(), name, to_string(found), to_string(expected));
}

// Reads every tensor of a kind into flat buffers in memory and hands each unit's to f(unit, flat).
template <class F>
void load(const std::filesystem::path& file, const SafetensorsReader& reader, const ParameterStore& store,
          const Kind& kind, F&& f) {
    std::vector<float> flat, transposed;
    for (int unit = 0; unit < store.units(); ++unit) {
        const UnitLayout& layout = store.layout(unit);
        flat.assign(static_cast<std::size_t>((store.buffers(unit).*kind.flat).elements()), 0.0F);
        for (const UnitLayout::Entry& entry : layout.entries()) {
            const std::string name = name_in(reader, layout.full_name(entry.spec) + kind.suffix);
            const Shape expected = file_shape(entry.spec);
            check_shape(file, reader, name, expected);
            const std::span<float> values = tensor_of(flat, entry);
            if (entry.spec.transposed_in_files) {
                transposed.resize(values.size());
                reader.read(name, std::span<float>(transposed));
                check_finite(file, name, transposed, expected);
                transpose(values, transposed, expected[0], expected[1]);
            } else {
                reader.read(name, values);
                check_finite(file, name, values, expected);
            }
        }
        f(unit, std::span<const float>(flat));
    }
}

// GPT-2's files carry the causal mask of each block, which is no weight.
bool is_mask(std::string_view name) {
    return name.ends_with(".attn.bias") || name.ends_with(".attn.masked_bias");
}

// A head of its own would be lost silently: only one that is the embedding is accepted.
void check_tied_head(const std::filesystem::path& file, const SafetensorsReader& reader) {
    if (!reader.contains(head_name)) return;
    const SafetensorsEntry& head = reader.entry(head_name);
    const std::string wte = name_in(reader, "wte.weight");
    if (head.shape == reader.entry(wte).shape) {
        std::vector<float> a(static_cast<std::size_t>(head.shape.elements())), b(a.size());
        reader.read(head.name, std::span<float>(a));
        reader.read(wte, std::span<float>(b));
        if (a == b) return;
    }
    user_error("{}: lm_head.weight differs from {}; this program trains GPT-2, whose head is the embedding",
               file.string(), wte);
}

void check_names(const std::filesystem::path& file, const SafetensorsReader& reader,
                 std::span<const UnitLayout> units) {
    std::set<std::string> known = {std::string(head_name)};
    for (const UnitLayout& unit : units) {
        for (const UnitLayout::Entry& entry : unit.entries()) known.insert(unit.full_name(entry.spec));
    }
    for (const SafetensorsEntry& entry : reader.entries()) {
        std::string_view name = entry.name;
        if (name.starts_with(prefix)) name.remove_prefix(prefix.size());
        if (is_mask(name) || known.contains(std::string(name))) continue;
        user_error("{}: {} is no tensor of this model of {}; give the sizes of the file's model",
                   file.string(), in_quotes(entry.name), plural(std::ssize(units) - 3, "block"));
    }
}

}  // namespace

void save_tensors(const std::filesystem::path& file, Device& device, const ParameterStore& store, Flat flat,
                  bool sync) {
    const Kind kind{flat, ""};
    save(file, device, store, std::span(&kind, 1), sync);
}

void check_weights(const std::filesystem::path& file, std::span<const UnitLayout> units) {
    const SafetensorsReader reader(file);
    check_names(file, reader, units);
    for (const UnitLayout& unit : units) {
        for (const UnitLayout::Entry& entry : unit.entries())
            check_shape(file, reader, name_in(reader, unit.full_name(entry.spec)), file_shape(entry.spec));
    }
}

void load_weights(const std::filesystem::path& file, ParameterStore& store) {
    const SafetensorsReader reader(file);
    check_names(file, reader, store.layouts());
    check_tied_head(file, reader);
    load(file, reader, store, weights,
         [&](int unit, std::span<const float> values) { store.set_weights(unit, values); });
}

void save_moments(const std::filesystem::path& file, Device& device, const ParameterStore& store, bool sync) {
    const Kind moments[] = {first_moment, second_moment};
    save(file, device, store, moments, sync);
}

void load_moments(const std::filesystem::path& file, Device& device, ParameterStore& store) {
    const SafetensorsReader reader(file);
    for (const Kind& kind : {first_moment, second_moment}) {
        load(file, reader, store, kind, [&](int unit, std::span<const float> values) {
            device.upload(store.buffers(unit).*kind.flat, values.data());
        });
    }
}

}  // namespace llmc
