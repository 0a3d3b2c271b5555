//! Completions for shells: those that clap generates, with the names of the disks of the running
//! server where a command of `ctl` takes a disk.
//!
//! A shell expands the words that it completes from. So `ctl names` prints only names without
//! characters that are special in a shell.

use clap_complete::Shell;

/// Prints the disks of the server that the command line on the terminal names.
const BASH: &str = r#"_blockyard_disks() {
    local i api=()
    for ((i = 1; i < COMP_CWORD - 1; i++)); do
        [[ ${COMP_WORDS[i]} == --api ]] || continue
        # Bash splits --api=SOCKET at the sign.
        [[ ${COMP_WORDS[i + 1]} == = ]] && ((i++))
        api=(--api "${COMP_WORDS[i + 1]}")
    done
    "${COMP_WORDS[0]}" ctl --timeout 2 "${api[@]}" names 2>/dev/null
}

"#;
const ZSH: &str = r#"
_blockyard_disks() {
    local -a api disks
    local at=${words[(I)--api(|=*)]}
    case ${words[at]} in
        --api) api=(--api "${words[at + 1]}") ;;
        --api=*) api=("${words[at]}") ;;
    esac
    disks=(${(f)"$(blockyard ctl --timeout 2 $api names 2>/dev/null)"})
    compadd -a disks
}
"#;
const FISH: &str = r#"function __blockyard_disks
    set -l words (commandline -opc)
    set -l api
    if set -l at (contains -i -- --api $words)
        set api --api $words[(math $at + 1)]
    else
        set api (string match -- '--api=*' $words)[-1]
    end
    $words[1] ctl --timeout 2 $api names 2>/dev/null
end
"#;

/// Returns the script for a shell.
pub fn script(shell: Shell, mut command: clap::Command) -> String {
    let disks = of_disks(&command);
    let mut script = Vec::new();
    clap_complete::generate(shell, &mut command, "blockyard", &mut script);
    let script = String::from_utf8_lossy(&script).into_owned();
    match shell {
        Shell::Bash => bash(&script, &disks),
        Shell::Zsh => zsh(&script),
        Shell::Fish => script + FISH + &fish(&disks),
        _ => script,
    }
}

/// Returns the commands of `ctl` that take a disk.
fn of_disks(command: &clap::Command) -> Vec<String> {
    let ctl = command.find_subcommand("ctl");
    let takes_disk =
        |command: &&clap::Command| command.get_positionals().any(|p| p.get_id() == "disk");
    let commands = ctl.into_iter().flat_map(clap::Command::get_subcommands).filter(takes_disk);
    commands.map(|command| command.get_name().to_string()).collect()
}

fn bash(script: &str, disks: &[String]) -> String {
    let cases = disks.iter().map(|name| format!("blockyard__subcmd__ctl__subcmd__{name})"));
    let cases: Vec<_> = cases.collect();
    let (mut text, mut is_disk) = (BASH.to_string(), false);
    for line in script.lines() {
        // The line after the case has the words.
        match line.strip_suffix('"').filter(|_| is_disk) {
            Some(words) => text += &format!("{words} $(_blockyard_disks)\"\n"),
            None => text += &format!("{line}\n"),
        }
        is_disk = cases.iter().any(|case| line.trim() == case);
    }
    text
}

fn zsh(script: &str) -> String {
    let script = script.replace("Name of the disk:_default'", "Name of the disk:_blockyard_disks'");
    // The first line names the command.
    match script.split_once('\n') {
        Some((first, rest)) => format!("{first}\n{ZSH}{rest}"),
        None => script,
    }
}

fn fish(disks: &[String]) -> String {
    format!(
        "complete -c blockyard -n \"__fish_blockyard_using_subcommand ctl; and \
         __fish_seen_subcommand_from {}\" -f -a \"(__blockyard_disks)\"\n",
        disks.join(" ")
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn commands_that_take_a_disk_complete_its_name() {
        let disks = of_disks(&crate::commands::whole_command());
        assert!(disks.len() > 10 && disks.iter().any(|name| name == "show"), "{disks:?}");
        assert!(!disks.iter().any(|name| name == "list"), "{disks:?}");
        let script = |shell| script(shell, crate::commands::whole_command());
        let all = |text: &str, part: &str| text.matches(part).count();
        assert_eq!(all(&script(Shell::Bash), "$(_blockyard_disks)"), disks.len());
        assert_eq!(all(&script(Shell::Zsh), ":_blockyard_disks'"), disks.len());
        let fish = script(Shell::Fish);
        assert!(fish.contains("set") && fish.contains("(__blockyard_disks)"), "{fish}");
    }
}
