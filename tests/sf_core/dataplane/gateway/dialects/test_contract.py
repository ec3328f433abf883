"""Every dialect is what its clients expect of it."""

from tests.bench.dataplane import clients

TestChat = clients.ChatClient
TestCompletions = clients.CompletionsClient
TestResponses = clients.ResponsesClient
TestAnthropic = clients.AnthropicClient
TestGoogle = clients.GoogleClient
