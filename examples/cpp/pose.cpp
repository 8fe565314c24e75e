// Poses with calibrated uncertainty from an end-to-end graph, in C++ with ONNX Runtime or OpenVINO.
//
//   halopose export --form end2end -o deployed
//   pose deployed/model.onnx photo.ppm [imgsz [drawn.png]]      prints the JSON that predict.py prints
//
// Images are binary PPM files. Built with OpenCV, the program reads its other formats too and draws 95 % ellipses.
// For Ultralytics' models: the letterbox is centred, grey 114, RGB from 0 to 1.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <exception>
#include <fstream>
#include <map>
#include <stdexcept>
#include <string>
#include <vector>

#ifdef HALOPOSE_ONNXRUNTIME
#include <onnxruntime_cxx_api.h>
#else
#include <openvino/openvino.hpp>
#endif
#ifdef HALOPOSE_OPENCV
#include <opencv2/core.hpp>
#include <opencv2/imgcodecs.hpp>
#include <opencv2/imgproc.hpp>
#endif

namespace {

struct Image {
    int width = 0, height = 0;
    std::vector<std::uint8_t> rgb;
};

#ifdef HALOPOSE_OPENCV
Image read_image(const std::string& path) {
    const cv::Mat bgr = cv::imread(path, cv::IMREAD_COLOR);
    if (bgr.empty()) throw std::runtime_error("cannot read " + path + ": it is missing or no image");
    Image image{bgr.cols, bgr.rows, std::vector<std::uint8_t>(static_cast<std::size_t>(3) * bgr.cols * bgr.rows)};
    cv::Mat rgb(image.height, image.width, CV_8UC3, image.rgb.data());
    cv::cvtColor(bgr, rgb, cv::COLOR_BGR2RGB);
    return image;
}
#else
Image read_image(const std::string& path) {
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
#endif

// The two source pixels beside each target pixel and their 11-bit weights, as OpenCV rounds them. At the border of columns
// one pixel has the whole weight; of rows it is taken twice.
struct Neighbours {
    std::vector<int> first, second;
    std::vector<std::int64_t> weight_first, weight_second;
    Neighbours(int old, int count, bool whole) : first(count), second(count), weight_first(count), weight_second(count) {
        for (int target = 0; target < count; ++target) {
            const float place = static_cast<float>((target + 0.5) * (static_cast<double>(old) / count) - 0.5);
            const int low = static_cast<int>(std::floor(place));
            const float share = whole && (low < 0 || low >= old - 1) ? 0.0f : place - static_cast<float>(low);
            first[target] = std::clamp(low, 0, old - 1);
            second[target] = std::clamp(low + 1, 0, old - 1);
            weight_first[target] = std::lrint((1.0f - share) * 2048.0f);
            weight_second[target] = std::lrint(share * 2048.0f);
        }
    }
};

Image resized(const Image& image, int width, int height) {
    if (width == image.width && height == image.height) return image;
    const Neighbours across(image.width, width, true), down(image.height, height, false);
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
    std::vector<float> pixels;              // 3 x height x width
    std::vector<std::int64_t> shape;        // 1, 3, height, width
    std::vector<float> letterbox;           // gain x, gain y, pad x, pad y, width, height
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
    Placed placed{std::vector<float>(3 * tall * wide, 114.0f / 255.0f),
                  {1, 3, static_cast<std::int64_t>(tall), static_cast<std::int64_t>(wide)},
                  {}};
    for (int channel = 0; channel < 3; ++channel)
        for (int row = 0; row < inner_height; ++row)
            for (int column = 0; column < inner_width; ++column)
                placed.pixels[(channel * tall + top + row) * wide + left + column] =
                    inner.rgb[3 * (static_cast<std::size_t>(inner_width) * row + column) + channel] / 255.0f;
    for (const double value : {static_cast<double>(inner_width) / image.width,
                               static_cast<double>(inner_height) / image.height, static_cast<double>(left),
                               static_cast<double>(top), static_cast<double>(image.width),
                               static_cast<double>(image.height)})
        placed.letterbox.push_back(static_cast<float>(value));
    return placed;
}

struct Output {
    std::vector<std::int64_t> shape;
    std::vector<double> values;
};
using Outputs = std::map<std::string, Output>;

template <typename T>
Output output_of(std::vector<std::int64_t> shape, const T* data, std::size_t count) {
    return {std::move(shape), std::vector<double>(data, data + count)};
}

// The graph in a runtime: its input size, 0 where it is free, and its outputs by name.
#ifdef HALOPOSE_ONNXRUNTIME
class Graph {
public:
    explicit Graph(const std::string& path) : session_(environment_, path.c_str(), Ort::SessionOptions()) {
        for (std::size_t number = 0; number < session_.GetOutputCount(); ++number)
            names_.push_back(session_.GetOutputNameAllocated(number, allocator_).get());
        const auto shape = session_.GetInputTypeInfo(0).GetTensorTypeAndShapeInfo().GetShape();
        height = static_cast<int>(std::max<std::int64_t>(shape.at(2), 0));
        width = static_cast<int>(std::max<std::int64_t>(shape.at(3), 0));
        image_input_ = session_.GetInputNameAllocated(0, allocator_).get();
    }

    Outputs run(Placed& placed) {
        const auto memory = Ort::MemoryInfo::CreateCpu(OrtArenaAllocator, OrtMemTypeDefault);
        const std::int64_t six[] = {1, 6};
        Ort::Value given[] = {
            Ort::Value::CreateTensor<float>(memory, placed.pixels.data(), placed.pixels.size(), placed.shape.data(), 4),
            Ort::Value::CreateTensor<float>(memory, placed.letterbox.data(), 6, six, 2)};
        const char* inputs[] = {image_input_.c_str(), "letterbox"};
        std::vector<const char*> names;
        for (const auto& name : names_) names.push_back(name.c_str());
        const auto found = session_.Run(Ort::RunOptions(), inputs, given, 2, names.data(), names.size());
        Outputs outputs;
        for (std::size_t number = 0; number < found.size(); ++number) {
            const auto info = found[number].GetTensorTypeAndShapeInfo();
            const auto count = info.GetElementCount();
            switch (info.GetElementType()) {
                case ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT:
                    outputs[names_[number]] = output_of(info.GetShape(), found[number].GetTensorData<float>(), count);
                    break;
                case ONNX_TENSOR_ELEMENT_DATA_TYPE_INT64:
                    outputs[names_[number]] =
                        output_of(info.GetShape(), found[number].GetTensorData<std::int64_t>(), count);
                    break;
                default:
                    outputs[names_[number]] = output_of(info.GetShape(), found[number].GetTensorData<bool>(), count);
            }
        }
        return outputs;
    }

    int height = 0, width = 0;

private:
    Ort::Env environment_;
    Ort::AllocatorWithDefaultOptions allocator_;
    Ort::Session session_;
    std::vector<std::string> names_;
    std::string image_input_;
};
#else
class Graph {
public:
    explicit Graph(const std::string& path) {
        ov::Core core;
        const auto model = core.read_model(path);
        const auto shape = model->input(0).get_partial_shape();
        height = shape[2].is_static() ? static_cast<int>(shape[2].get_length()) : 0;
        width = shape[3].is_static() ? static_cast<int>(shape[3].get_length()) : 0;
        compiled_ = core.compile_model(model, "CPU", ov::hint::inference_precision(ov::element::f32));
    }

    Outputs run(Placed& placed) {
        auto request = compiled_.create_infer_request();
        const ov::Shape shape(placed.shape.begin(), placed.shape.end());
        request.set_tensor(compiled_.input(0), ov::Tensor(ov::element::f32, shape, placed.pixels.data()));
        request.set_tensor("letterbox", ov::Tensor(ov::element::f32, {1, 6}, placed.letterbox.data()));
        request.infer();
        Outputs outputs;
        for (const auto& port : compiled_.outputs()) {
            const auto tensor = request.get_tensor(port);
            const ov::Shape found = tensor.get_shape();
            const std::vector<std::int64_t> sides(found.begin(), found.end());
            Output& output = outputs[port.get_any_name()];
            if (tensor.get_element_type() == ov::element::f32)
                output = output_of(sides, tensor.data<const float>(), tensor.get_size());
            else if (tensor.get_element_type() == ov::element::i64)
                output = output_of(sides, tensor.data<const std::int64_t>(), tensor.get_size());
            else
                output = output_of(sides, tensor.data<const bool>(), tensor.get_size());
        }
        return outputs;
    }

    int height = 0, width = 0;

private:
    ov::CompiledModel compiled_;
};
#endif

// Prints numbers as a JSON list; `step` of them make an inner list where it is above 1.
void print(const double* values, std::size_t count, std::size_t step) {
    std::printf("[");
    for (std::size_t number = 0; number < count; ++number) {
        if (step > 1 && number % step == 0) std::printf("%s[", number ? ", " : "");
        std::printf("%s%.9g", number % step ? ", " : (step > 1 || !number ? "" : ", "), values[number]);
        if (step > 1 && number % step == step - 1) std::printf("]");
    }
    std::printf("]");
}

void print_detections(const Outputs& outputs) {
    const auto& sizes = outputs.at("keypoints").shape;
    const std::size_t detections = sizes.at(0), keypoints = sizes.at(1);
    const auto row = [&](const char* name, std::size_t n) {
        const auto& values = outputs.at(name).values;
        return values.data() + (detections ? values.size() / detections : 0) * n;
    };
    std::printf("[");
    for (std::size_t n = 0; n < detections; ++n) {
        const double* box = row("boxes", n);
        const double sides[] = {box[0], box[1], box[2] - box[0], box[3] - box[1]};
        std::printf("%s{\"category_id\": %d, \"bbox\": ", n ? ", " : "", static_cast<int>(*row("classes", n)));
        print(sides, 4, 1);
        std::printf(", \"score\": %.9g, \"keypoints\": ", *row("scores", n));
        std::vector<double> triples;
        for (std::size_t k = 0; k < keypoints; ++k) {
            const double* point = row("keypoints", n) + 2 * k;
            triples.insert(triples.end(),
                           {point[0], point[1], outputs.count("visibility") ? row("visibility", n)[k] : 1.0});
        }
        print(triples.data(), triples.size(), 1);
        std::printf(", \"covariance\": ");
        print(row("covariance", n), 3 * keypoints, 3);
        std::printf(", \"keep\": [");
        for (std::size_t k = 0; k < keypoints; ++k)
            std::printf("%s%s", k ? ", " : "", row("keep", n)[k] != 0 ? "true" : "false");
        std::printf("]");
        if (std::isfinite(*row("dof", n))) {
            std::printf(", \"scale\": ");
            print(row("scale", n), 3 * keypoints, 3);
            std::printf(", \"dof\": ");
            print(row("dof", n), keypoints, 1);
        }
        if (outputs.count("novelty")) std::printf(", \"novelty\": %.9g", *row("novelty", n));
        std::printf("}");
    }
    std::printf("]\n");
}

#ifdef HALOPOSE_OPENCV
// Draws the ellipse of each keypoint that contains it with a probability of 95 %; pruned keypoints are thin and grey.
void draw(const std::string& source, const Outputs& outputs, const std::string& target) {
    cv::Mat picture = cv::imread(source, cv::IMREAD_COLOR);
    const auto value = [&](const char* name, std::size_t place) { return outputs.at(name).values[place]; };
    const int width = std::max(1, std::max(picture.cols, picture.rows) / 640);
    for (std::size_t k = 0; k < outputs.at("dof").values.size(); ++k) {
        const double xx = value("scale", 3 * k), xy = value("scale", 3 * k + 1), yy = value("scale", 3 * k + 2);
        const double dof = value("dof", k);
        const double radius = std::isfinite(dof) ? dof * std::expm1(-2 / dof * std::log1p(-0.95)) : -2 * std::log1p(-0.95);
        const double major = (xx + yy) / 2 + std::hypot((xx - yy) / 2, xy), minor = (xx * yy - xy * xy) / major;
        const bool kept = value("keep", k) != 0;
        cv::ellipse(picture,
                    cv::RotatedRect(cv::Point2f(static_cast<float>(value("keypoints", 2 * k)),
                                                static_cast<float>(value("keypoints", 2 * k + 1))),
                                    cv::Size2f(static_cast<float>(2 * std::sqrt(major * radius)),
                                               static_cast<float>(2 * std::sqrt(minor * radius))),
                                    static_cast<float>(std::atan2(2 * xy, xx - yy) * 90 / CV_PI)),
                    kept ? cv::Scalar(80, 200, 90) : cv::Scalar(140, 140, 140), kept ? 2 * width : width, cv::LINE_AA);
    }
    if (!cv::imwrite(target, picture)) throw std::runtime_error("cannot write " + target);
}
#else
void draw(const std::string&, const Outputs&, const std::string&) {
    throw std::runtime_error("pictures need OpenCV: install its headers and build again");
}
#endif

void run(const std::string& model, const std::string& image, int imgsz, const std::string& picture) {
    Graph graph(model);
    const bool fixed = graph.height > 0 && graph.width > 0;
    const int size = (imgsz + 31) / 32 * 32;
    Placed placed = letterboxed(read_image(image), fixed ? graph.height : size, fixed ? graph.width : size, !fixed);
    const Outputs outputs = graph.run(placed);
    if (!picture.empty()) draw(image, outputs, picture);
    print_detections(outputs);
}

}  // namespace

int main(int count, char** arguments) {
    if (count < 3) {
        std::fprintf(stderr, "usage: pose model.onnx photo.ppm [imgsz [drawn.png]]\n");
        return 2;
    }
    try {
        run(arguments[1], arguments[2], count > 3 ? std::stoi(arguments[3]) : 640, count > 4 ? arguments[4] : "");
    } catch (const std::exception& error) {
        std::fprintf(stderr, "pose: %s\n", error.what());
        return 2;
    }
    return 0;
}
