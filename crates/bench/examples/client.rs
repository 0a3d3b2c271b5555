#[derive(clap::Parser)]
struct Arguments {
    #[command(flatten)]
    options: blockyard_bench::client::Options,
}

fn main() -> anyhow::Result<()> {
    blockyard_bench::client::run(&<Arguments as clap::Parser>::parse().options)
}
