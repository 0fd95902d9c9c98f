// Chat templates against renderings by jinja2 (tests/data/chat): of DeepSeek-V3's published
// template, and of reconstructions of Kimi's.
#include <gtest/gtest.h>

#include <algorithm>
#include <initializer_list>
#include <sstream>

#include "core/json_text.h"
#include "tests/unit/text_test_support.h"
#include "text/chat_template.h"

namespace kdtree {
namespace {

using ChatJson = nlohmann::ordered_json;

// As they are written: declared tools keep the order of their keys.
std::vector<ChatJson> chat_cases(const std::string& name) {
  std::istringstream lines(read_file(tokenizer_path("../chat/" + name)));
  std::vector<ChatJson> cases;
  for (std::string line; std::getline(lines, line);) {
    cases.push_back(parse_ordered_json(line, name));
  }
  EXPECT_GE(cases.size(), 30U) << name;
  return cases;
}

std::string render(ChatTemplate chat_template, const ChatJson& chat, bool thinking = true) {
  std::string text;
  for (const ChatSegment& segment :
       render_chat(chat_template, parse_chat(chat, "c.json"), thinking)) {
    text += segment.text;
  }
  return text;
}

TEST(TextChat, DeepseekEqualsThePublishedTemplate) {
  for (const ChatJson& line : chat_cases("deepseek_v3.jsonl")) {
    const auto expected = line["text"].get<std::string>();
    EXPECT_EQ(render(ChatTemplate::kDeepseekV3, line), expected) << line;
    const bool answers = expected.ends_with("<｜Assistant｜>");
    EXPECT_EQ(render(ChatTemplate::kDeepseekR1, line), expected + (answers ? "<think>\n" : ""));
  }
}

TEST(TextChat, KimiEqualsTheReconstructedTemplates) {
  for (const ChatJson& line : chat_cases("kimi_k2.jsonl")) {
    EXPECT_EQ(render(ChatTemplate::kKimiK2, line), line["text"].get<std::string>()) << line;
  }
  int num_thinking = 0;
  for (const ChatJson& line : chat_cases("kimi_k26.jsonl")) {
    const bool thinking = line["thinking"].get<bool>();
    num_thinking += thinking ? 1 : 0;
    EXPECT_EQ(render(ChatTemplate::kKimiK26, line, thinking), line["text"].get<std::string>())
        << line;
  }
  EXPECT_EQ(num_thinking, 50);
}

TEST(TextChat, Kimi) {
  const ChatJson hello = {{{"role", "user"}, {"content", "Hi"}}};
  const std::string user = "<|im_user|>user<|im_middle|>Hi<|im_end|>";
  const std::string header = "<|im_assistant|>assistant<|im_middle|>";
  EXPECT_EQ(render(ChatTemplate::kKimiK26, hello), user + header + "<think>");
  EXPECT_EQ(render(ChatTemplate::kKimiK26, hello, false), user + header + "<think></think>");
  EXPECT_EQ(render(ChatTemplate::kKimiK2, hello),
            "<|im_system|>system<|im_middle|>You are Kimi, an AI assistant created by Moonshot "
            "AI.<|im_end|>" +
                user + header);
  ChatJson chat = hello;
  chat.push_back({{"role", "assistant"}, {"content", "A"}, {"reasoning_content", "old"}});
  chat.push_back({{"role", "user"}, {"content", "Hi"}});
  const ChatJson call = {{"id", "f:0"}, {"function", {{"name", "f"}, {"arguments", "{}"}}}};
  chat.push_back({{"role", "assistant"}, {"reasoning_content", "new"}, {"tool_calls", {call}}});
  chat.push_back({{"role", "tool"}, {"tool_call_id", "f:0"}, {"content", "1"}});
  EXPECT_EQ(render(ChatTemplate::kKimiK26, chat),
            user + header + "<think></think>A<|im_end|>" + user + header +
                "<think>new</think><|tool_calls_section_begin|><|tool_call_begin|>f:0"
                "<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_calls_section_end|>"
                "<|im_end|><|im_system|>tool<|im_middle|>## Return of f:0\n1<|im_end|>" +
                header + "<think>");
}

TEST(TextChat, ControlTokensOfAUserStayText) {
  const ChatJson chat = {{{"role", "user"}, {"content", "<|im_end|>"}}};
  const Tokenizer tokenizer = load_tokenizer(tokenizer_path("kimi_like"));
  const std::int32_t end = *tokenizer.find_added("<|im_end|>");
  const auto count = [&](const ChatJson& messages) {
    const Ids ids = encode_chat(
        tokenizer, render_chat(ChatTemplate::kKimiK26, parse_chat(messages, "c"), true));
    return std::count(ids.begin(), ids.end(), end);
  };
  EXPECT_EQ(count(chat), 1);
}

TEST(TextChat, WrongConversationsAreNamed) {
  const auto refused = [](const char* text, std::initializer_list<std::string> words) {
    expect_input_error([&] { parse_chat(ChatJson::parse(text), "c.json"); }, words);
  };
  refused("3", {"c.json", "object"});
  refused("{}", {"messages", "missing"});
  refused("[]", {"c.json", "no messages"});
  refused(R"([{"role": "judge", "content": "x"}])", {"[0].role", "judge", "user"});
  refused(R"([{"role": "user"}])", {"[0].content", "missing"});
  refused(R"([{"role": "user", "content": 3}])", {"[0].content", "3", "string"});
  const std::string hi = R"({"messages": [{"role": "user", "content": "Hi"}], "tools": )";
  refused((hi + "3}").c_str(), {"c.json", "tools", "3", "list"});
  refused((hi + "[{}, 1]}").c_str(), {"c.json", "tools[1]", "1", "object"});
  const Chat tools = parse_chat(ChatJson::parse(hi + R"([{"b": 1, "a": 2}]})"), "c.json");
  EXPECT_EQ(tools.tools, R"([{"b":1,"a":2}])");
  expect_input_error([&] { render_chat(ChatTemplate::kDeepseekR1, tools, true); },
                     {"c.json", "tools", "DeepSeek"});
}

}  // namespace
}  // namespace kdtree
