// Reads [{"modelfile": text, "conversations": [[{"role", "content"}, ...], ...]}, ...] and writes, for each, the prompts
// that Ollama makes of the conversations, by its published rules: how a Modelfile is read, when its SYSTEM is added, that
// messages of one role in a row become one, and the fields and functions that a TEMPLATE has.
package main

import (
	"encoding/json"
	"os"
	"strconv"
	"strings"
	"text/template"
	"time"
	"unicode"
)

type message struct {
	Role, Content, Thinking, ToolName, ToolCallID string
	Images, ToolCalls                             []any
}

type job struct {
	Modelfile     string
	Conversations [][]message
}

type answer struct {
	Prompts []string
	Stops   []string
}

func check(problem error) {
	if problem != nil {
		panic(problem)
	}
}

// A value ends at the end of a line, but for one in quotes; what cannot be printed is left out of it.
func commands(text string) [][2]string {
	var found [][2]string
	lines := strings.SplitAfter(text, "\n")
	for number := 0; number < len(lines); number++ {
		line := lines[number]
		name, value, separated := strings.Cut(line, " ")
		if strings.HasPrefix(line, "#") || !separated {
			continue
		}
		for {
			trimmed := strings.TrimSpace(value)
			triple := strings.HasPrefix(trimmed, `"""`) && (len(trimmed) < 6 || !strings.HasSuffix(trimmed, `"""`))
			if !triple || number+1 == len(lines) {
				break
			}
			number++
			value += lines[number]
		}
		var printable strings.Builder
		for _, char := range value {
			if strconv.IsPrint(char) || char == '\n' || char == '\r' || char == '\t' {
				printable.WriteRune(char)
			}
		}
		value = strings.TrimFunc(printable.String(), unicode.IsSpace)
		if strings.HasPrefix(value, `"""`) {
			value = value[3 : len(value)-3]
		}
		found = append(found, [2]string{strings.ToLower(name), value})
	}
	return found
}

func main() {
	var jobs []job
	check(json.NewDecoder(os.Stdin).Decode(&jobs))
	functions := template.FuncMap{
		"json":        func(value any) string { text, _ := json.Marshal(value); return string(text) },
		"currentDate": func(...string) string { return time.Now().Format("2006-01-02") },
	}
	var answers []answer
	for _, job := range jobs {
		var written, added string
		result := answer{}
		for _, command := range commands(job.Modelfile) {
			switch command[0] {
			case "template":
				written = command[1]
			case "system":
				added = command[1]
			case "parameter":
				stop := strings.TrimPrefix(command[1], "stop ")
				result.Stops = append(result.Stops, strings.TrimSuffix(strings.TrimPrefix(stop, `"`), `"`))
			}
		}
		parsed, problem := template.New("").Option("missingkey=zero").Funcs(functions).Parse(written)
		check(problem)
		for _, conversation := range job.Conversations {
			if added != "" && conversation[0].Role != "system" {
				conversation = append([]message{{Role: "system", Content: added}}, conversation...)
			}
			var system []string
			var messages []*message
			for index := range conversation {
				current := &conversation[index]
				if current.Role == "system" {
					system = append(system, current.Content)
				}
				if last := len(messages) - 1; last >= 0 && messages[last].Role == current.Role && current.Role != "tool" {
					messages[last].Content += "\n\n" + current.Content
				} else {
					messages = append(messages, current)
				}
			}
			var prompt strings.Builder
			check(parsed.Execute(&prompt, map[string]any{
				"System": strings.Join(system, "\n\n"), "Messages": messages, "Tools": nil, "Response": "",
				"Think": false, "ThinkLevel": "", "IsThinkSet": false,
			}))
			result.Prompts = append(result.Prompts, prompt.String())
		}
		answers = append(answers, result)
	}
	check(json.NewEncoder(os.Stdout).Encode(answers))
}
