// Poses with calibrated uncertainty from an end-to-end graph, in C++ with OpenVINO.
//
//   halopose export --form end2end -o deployed
//   pose deployed/model.onnx photo.ppm [imgsz]      prints the JSON that predict.py prints
//
// Images are binary PPM files. For Ultralytics' models: the letterbox is centred, grey 114, RGB from 0 to 1.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <exception>
#include <fstream>
#include <stdexcept>
#include <string>
#include <vector>

#include <openvino/openvino.hpp>

namespace {

struct Image {
    int width = 0, height = 0;
    std::vector<std::uint8_t> rgb;
};

Image read_ppm(const std::string& path) {
    std::ifstream file(path, std::ios::binary);
    std::string magic;
    Image image;
    int largest = 0;
    if (!(file >> magic >> image.width >> image.height >> largest) || magic != "P6" || largest != 255 ||
        image.width < 1 || image.height < 1 || image.width > 65536 || image.height > 65536)
        throw std::runtime_error("cannot read " + path + ": give a binary PPM image with 8 bits");
    file.get();
    image.rgb.resize(static_cast<std::size_t>(3) * image.width * image.height);
    if (!file.read(reinterpret_cast<char*>(image.rgb.data()), static_cast<std::streamsize>(image.rgb.size())))
        throw std::runtime_error("cannot read " + path + ": it is truncated");
    return image;
}

// The two source pixels beside each target pixel and their 11-bit weights, as OpenCV rounds them.
struct Neighbours {
    std::vector<int> first, second;
    std::vector<std::int64_t> weight_first, weight_second;
    Neighbours(int old, int count) : first(count), second(count), weight_first(count), weight_second(count) {
        for (int target = 0; target < count; ++target) {
            const float place = static_cast<float>((target + 0.5) * (static_cast<double>(old) / count) - 0.5);
            const int low = std::clamp(static_cast<int>(std::floor(place)), 0, old - 1);
            const float share = low < old - 1 ? std::max(place - static_cast<float>(low), 0.0f) : 0.0f;
            first[target] = low;
            second[target] = std::min(low + 1, old - 1);
            weight_first[target] = std::lrint((1.0f - share) * 2048.0f);
            weight_second[target] = std::lrint(share * 2048.0f);
        }
    }
};

Image resized(const Image& image, int width, int height) {
    if (width == image.width && height == image.height) return image;
    const Neighbours across(image.width, width), down(image.height, height);
    Image result{width, height, std::vector<std::uint8_t>(static_cast<std::size_t>(3) * width * height)};
    const auto mixed = [&](int row, int column, int channel) {
        const std::uint8_t* line = image.rgb.data() + static_cast<std::size_t>(3) * image.width * row;
        return (line[3 * across.first[column] + channel] * across.weight_first[column] +
                line[3 * across.second[column] + channel] * across.weight_second[column]) >> 4;
    };
    for (int row = 0; row < height; ++row)
        for (int column = 0; column < width; ++column)
            for (int channel = 0; channel < 3; ++channel) {
                const auto upper = (mixed(down.first[row], column, channel) * down.weight_first[row]) >> 16;
                const auto lower = (mixed(down.second[row], column, channel) * down.weight_second[row]) >> 16;
                result.rgb[3 * (static_cast<std::size_t>(width) * row + column) + channel] =
                    static_cast<std::uint8_t>((upper + lower + 2) >> 2);
            }
    return result;
}

int rounded(double value) { return static_cast<int>(std::nearbyint(value)); }  // half to even, as Python rounds

struct Placed {
    ov::Tensor pixels, letterbox;
};

Placed letterboxed(const Image& image, int height, int width, bool trimmed) {
    const double ratio = std::min(static_cast<double>(height) / image.height, static_cast<double>(width) / image.width);
    const int inner_width = std::max(rounded(image.width * ratio), 1);
    const int inner_height = std::max(rounded(image.height * ratio), 1);
    int spare_x = width - inner_width, spare_y = height - inner_height;
    if (trimmed) {
        spare_x %= 32;
        spare_y %= 32;
    }
    const int left = rounded(spare_x / 2.0 - 0.1), top = rounded(spare_y / 2.0 - 0.1);
    const std::size_t tall = inner_height + spare_y, wide = inner_width + spare_x;
    const Image inner = resized(image, inner_width, inner_height);
    Placed placed{ov::Tensor(ov::element::f32, {1, 3, tall, wide}), ov::Tensor(ov::element::f32, {1, 6})};
    float* pixels = placed.pixels.data<float>();
    std::fill_n(pixels, 3 * tall * wide, 114.0f / 255.0f);
    for (int channel = 0; channel < 3; ++channel)
        for (int row = 0; row < inner_height; ++row)
            for (int column = 0; column < inner_width; ++column)
                pixels[(channel * tall + top + row) * wide + left + column] =
                    inner.rgb[3 * (static_cast<std::size_t>(inner_width) * row + column) + channel] / 255.0f;
    const double values[] = {static_cast<double>(inner_width) / image.width,
                             static_cast<double>(inner_height) / image.height,
                             static_cast<double>(left),
                             static_cast<double>(top),
                             static_cast<double>(image.width),
                             static_cast<double>(image.height)};
    std::transform(std::begin(values), std::end(values), placed.letterbox.data<float>(),
                   [](double value) { return static_cast<float>(value); });
    return placed;
}

// Prints numbers as a JSON list; `step` of them make an inner list where it is above 1.
void print(const float* values, std::size_t count, std::size_t step) {
    std::printf("[");
    for (std::size_t number = 0; number < count; ++number) {
        if (step > 1 && number % step == 0) std::printf("%s[", number ? ", " : "");
        std::printf("%s%.9g", number % step ? ", " : (step > 1 || !number ? "" : ", "), values[number]);
        if (step > 1 && number % step == step - 1) std::printf("]");
    }
    std::printf("]");
}

void run(const std::string& model_path, const std::string& image_path, int imgsz) {
    ov::Core core;
    const auto model = core.read_model(model_path);
    const auto shape = model->input("images").get_partial_shape();
    const bool fixed = shape[2].is_static() && shape[3].is_static();
    const int size = (imgsz + 31) / 32 * 32;
    const int height = fixed ? static_cast<int>(shape[2].get_length()) : size;
    const int width = fixed ? static_cast<int>(shape[3].get_length()) : size;
    auto compiled = core.compile_model(model, "CPU", ov::hint::inference_precision(ov::element::f32));
    const Placed placed = letterboxed(read_ppm(image_path), height, width, !fixed);
    auto request = compiled.create_infer_request();
    request.set_tensor("images", placed.pixels);
    request.set_tensor("letterbox", placed.letterbox);
    request.infer();
    const auto values = [&](const char* name) { return request.get_tensor(name).data<float>(); };
    const auto points = request.get_tensor("keypoints").get_shape();
    const std::size_t detections = points[0], keypoints = points[1];
    const auto classes = request.get_tensor("classes");
    const auto keep = request.get_tensor("keep");
    bool has_visibility = false, has_novelty = false;
    for (const auto& output : compiled.outputs()) {
        has_visibility |= output.get_names().count("visibility") > 0;
        has_novelty |= output.get_names().count("novelty") > 0;
    }
    std::printf("[");
    for (std::size_t n = 0; n < detections; ++n) {
        const float* box = values("boxes") + 4 * n;
        const float sides[] = {box[0], box[1], box[2] - box[0], box[3] - box[1]};
        std::printf("%s{\"category_id\": %lld, \"bbox\": ", n ? ", " : "",
                    static_cast<long long>(classes.data<std::int64_t>()[n]));
        print(sides, 4, 1);
        std::printf(", \"score\": %.9g, \"keypoints\": ", values("scores")[n]);
        std::vector<float> triples;
        for (std::size_t k = 0; k < keypoints; ++k) {
            const std::size_t place = n * keypoints + k;
            triples.insert(triples.end(), {values("keypoints")[2 * place], values("keypoints")[2 * place + 1],
                                           has_visibility ? values("visibility")[place] : 1.0f});
        }
        print(triples.data(), triples.size(), 1);
        std::printf(", \"covariance\": ");
        print(values("covariance") + 3 * keypoints * n, 3 * keypoints, 3);
        std::printf(", \"keep\": [");
        for (std::size_t k = 0; k < keypoints; ++k)
            std::printf("%s%s", k ? ", " : "", keep.data<bool>()[n * keypoints + k] ? "true" : "false");
        std::printf("]");
        if (std::isfinite(values("dof")[n * keypoints])) {
            std::printf(", \"scale\": ");
            print(values("scale") + 3 * keypoints * n, 3 * keypoints, 3);
            std::printf(", \"dof\": ");
            print(values("dof") + keypoints * n, keypoints, 1);
        }
        if (has_novelty) std::printf(", \"novelty\": %.9g", values("novelty")[n]);
        std::printf("}");
    }
    std::printf("]\n");
}

}  // namespace

int main(int count, char** arguments) {
    if (count < 3) {
        std::fprintf(stderr, "usage: pose model.onnx photo.ppm [imgsz]\n");
        return 2;
    }
    try {
        run(arguments[1], arguments[2], count > 3 ? std::stoi(arguments[3]) : 640);
    } catch (const std::exception& error) {
        std::fprintf(stderr, "pose: %s\n", error.what());
        return 2;
    }
    return 0;
}
