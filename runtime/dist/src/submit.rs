//! Writes the files with which cluster engines start a job: an sbatch script for Slurm, an indexed Job for Kubernetes.

use crate::launch::{RESTART, quote};
use perilune_core::error::{Error, Result};

/// A job for a cluster.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Submission {
    pub name: String,
    pub nodes: usize,
    /// One process drives all GPUs of a host; some sites want one a GPU.
    pub processes_per_node: usize,
    pub gpus_per_node: usize,
    /// The time limit as Slurm writes it; none for the site's own.
    pub time: Option<String>,
    pub partition: Option<String>,
    /// The container image, for Kubernetes.
    pub image: Option<String>,
    /// The claim of the volume in which the job runs, for Kubernetes.
    pub volume: Option<String>,
    /// How often pods may fail, for Kubernetes.
    pub max_restarts: usize,
    /// The arguments of `perilune`.
    pub args: Vec<String>,
}

/// The seconds before the time limit when Slurm sends SIGUSR1, and that Kubernetes waits after SIGTERM: for a checkpoint.
const CHECKPOINT_SECONDS: usize = 120;
const PORT: u16 = 29500;

impl Submission {
    fn check(&self) -> Result<()> {
        let wrong = |message: String, hint: &str| Err(Error::argument("submit", message).hint(hint));
        let good = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-';
        let name = &self.name;
        if name.is_empty() || name.len() > 40 || !name.chars().all(good) || name.starts_with('-') || name.ends_with('-')
        {
            let rule = "a name has at most 40 letters a to z, digits and hyphens, with none at its ends";
            return wrong(format!("--name {name}: {rule}"), "choose such a name with --name");
        }
        for (flag, value) in [("--nodes", self.nodes), ("--processes-per-node", self.processes_per_node)] {
            if value == 0 {
                return wrong(format!("{flag} 0: there is at least 1"), "leave it out for 1");
            }
        }
        let word = |text: &str| text.chars().all(|c| c.is_ascii_alphanumeric() || "-_:.,/@".contains(c));
        let options = [
            ("--time", &self.time),
            ("--partition", &self.partition),
            ("--volume", &self.volume),
            ("--image", &self.image),
        ];
        for (flag, value) in options {
            if let Some(value) = value.as_ref().filter(|v| v.is_empty() || !word(v)) {
                return wrong(
                    format!("{flag} {value}: this is no single word"),
                    "write it as the engine's manual does",
                );
            }
        }
        if self.args.is_empty() {
            return wrong("there is nothing to run".into(), "write the command after --, as in -- run recipe.lua");
        }
        Ok(())
    }

    /// The arguments, completed so that a job that is started again continues. `dir`: the run directory if none is given.
    fn resuming(&self, dir: &str) -> Vec<String> {
        let mut args = self.args.clone();
        let is_run = args[0] == "run" || args[0].ends_with(".lua");
        let has = |flag: &str| self.args.iter().any(|a| a == flag || a.starts_with(&format!("{flag}=")));
        if is_run && !has("--run-dir") {
            args.extend(["--run-dir".into(), dir.into()]);
        }
        if is_run && !has("--resume") {
            args.push("--resume".into());
        }
        args
    }

    /// The script for `sbatch`.
    pub fn slurm(&self) -> Result<String> {
        self.check()?;
        let Submission { name, nodes, processes_per_node, gpus_per_node, .. } = self;
        let mut out = format!(
            "#!/bin/bash\n#SBATCH --job-name={name}\n#SBATCH --nodes={nodes}\n#SBATCH --ntasks-per-node={processes_per_node}\n"
        );
        let mut option = |name: &str, value: &str| out.push_str(&format!("#SBATCH --{name}={value}\n"));
        if *gpus_per_node > 0 {
            option("gpus-per-node", &gpus_per_node.to_string());
        }
        for (name, value) in [("time", &self.time), ("partition", &self.partition)] {
            if let Some(value) = value {
                option(name, value);
            }
        }
        option("signal", &format!("USR1@{CHECKPOINT_SECONDS}"));
        option("output", "%x-%j.log");
        option("open-mode", "append");
        out.push_str("#SBATCH --requeue\n\n");
        out.push_str("# The job keeps its number when it is queued again, and with it the directory of its run.\n");
        // The number stands outside the quotes, so that the shell inserts it.
        let command: Vec<String> = self.resuming(&format!("runs/{name}-JOB")).iter().map(|a| shell(a)).collect();
        let own = shell(&format!("runs/{name}-JOB"));
        let command =
            command.iter().map(|a| if *a == own { format!("\"runs/{name}-$SLURM_JOB_ID\"") } else { a.clone() });
        let command: Vec<String> = command.collect();
        out.push_str(&format!("srun --kill-on-bad-exit=0 --wait=300 perilune {}\nstatus=$?\n\n", command.join(" ")));
        out.push_str(&format!(
            "# {RESTART}: the run has written a checkpoint and asks to be started again.\n\
             if [ \"$status\" = {RESTART} ]; then scontrol requeue \"$SLURM_JOB_ID\"; fi\nexit \"$status\"\n"
        ));
        Ok(out)
    }

    /// The Service and Job for `kubectl apply`.
    pub fn kubernetes(&self) -> Result<String> {
        self.check()?;
        let Submission { name, nodes, gpus_per_node, max_restarts, .. } = self;
        let Some(image) = &self.image else {
            let message = "an image is missing: pods run perilune from one";
            return Err(Error::argument("submit", message).hint("give it with --image REGISTRY/NAME:TAG"));
        };
        if self.processes_per_node != 1 {
            let message = format!("--processes-per-node {}: a pod has one process", self.processes_per_node);
            return Err(Error::argument("submit", message).hint("give more --nodes with fewer --gpus-per-node"));
        }
        let args = self.resuming(&format!("runs/{name}"));
        // Kubernetes replaces $(NAME) in arguments, and $$ by $.
        let args: Vec<String> = args.iter().map(|a| quote(&a.replace('$', "$$"))).collect();
        let gpus = match gpus_per_node {
            0 => String::new(),
            n => format!("        resources:\n          limits:\n            nvidia.com/gpu: {n}\n"),
        };
        let (mounts, volumes) = match &self.volume {
            None => (String::new(), String::new()),
            Some(claim) => (
                "        workingDir: /work\n        volumeMounts:\n        - name: work\n          mountPath: /work\n"
                    .into(),
                format!(
                    "      volumes:\n      - name: work\n        persistentVolumeClaim:\n          claimName: {}\n",
                    quote(claim)
                ),
            ),
        };
        Ok(format!(
            "# Pods find each other by the names that this service gives them.
apiVersion: v1
kind: Service
metadata:
  name: {name}
spec:
  clusterIP: None
  publishNotReadyAddresses: true
  selector:
    job-name: {name}
---
apiVersion: batch/v1
kind: Job
metadata:
  name: {name}
spec:
  completionMode: Indexed
  completions: {nodes}
  parallelism: {nodes}
  backoffLimit: {max_restarts}
  podFailurePolicy:
    rules:
    # The run has written a checkpoint and asks to be started again.
    - action: Ignore
      onExitCodes:
        containerName: perilune
        operator: In
        values: [{RESTART}]
    # Wrong usage, or refused: another attempt would end the same way.
    - action: FailJob
      onExitCodes:
        containerName: perilune
        operator: In
        values: [2, 4]
    - action: Ignore
      onPodConditions:
      - type: DisruptionTarget
  template:
    spec:
      subdomain: {name}
      restartPolicy: Never
      terminationGracePeriodSeconds: {CHECKPOINT_SECONDS}
      containers:
      - name: perilune
        image: {}
        command: [\"perilune\"]
        args: [{}]
        env:
        - name: WORLD_SIZE
          value: \"{nodes}\"
        - name: MASTER_ADDR
          value: \"{name}-0.{name}\"
        - name: MASTER_PORT
          value: \"{PORT}\"
{gpus}{mounts}{volumes}",
            quote(image),
            args.join(", "),
        ))
    }
}

/// A word of a shell, quoted if it has to be.
fn shell(word: &str) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || "-_=+:,./@%".contains(c);
    match !word.is_empty() && word.chars().all(plain) {
        true => word.to_string(),
        false => format!("'{}'", word.replace('\'', r"'\''")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn submission() -> Submission {
        Submission {
            name: "gpt2".into(),
            nodes: 2,
            processes_per_node: 1,
            gpus_per_node: 8,
            time: Some("24:00:00".into()),
            partition: None,
            image: Some("registry.example/perilune:0.1".into()),
            volume: Some("training".into()),
            max_restarts: 6,
            args: ["run", "recipes/gpt2.lua", "--mesh", "dp=16", "--set", "text=it's \"it\""].map(String::from).into(),
        }
    }

    /// Compares with a file of `golden/`; `PERILUNE_BLESS=1` writes it.
    fn golden(name: &str, text: &str) {
        let path = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("golden").join(name);
        if std::env::var_os("PERILUNE_BLESS").is_some() {
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(&path, text).unwrap();
        }
        assert_eq!(std::fs::read_to_string(&path).unwrap_or_default(), text, "{}", path.display());
    }

    #[test]
    fn job_files_are_those_of_the_golden_ones() {
        golden("gpt2.sbatch", &submission().slurm().unwrap());
        golden("gpt2.yaml", &submission().kubernetes().unwrap());
        let small = Submission {
            nodes: 1,
            gpus_per_node: 0,
            time: None,
            partition: Some("cpu".into()),
            volume: None,
            args: ["run", "r.lua", "--run-dir", "d", "--resume"].map(String::from).into(),
            ..submission()
        };
        golden("cpu.sbatch", &Submission { processes_per_node: 4, ..small.clone() }.slurm().unwrap());
        golden("cpu.yaml", &small.kubernetes().unwrap());
    }

    #[test]
    fn what_an_engine_would_misread_is_refused() {
        for (change, message) in [
            (Submission { name: "Big Job".into(), ..submission() }, "--name Big Job: a name has at most 40"),
            (Submission { nodes: 0, ..submission() }, "--nodes 0: there is at least 1"),
            (Submission { processes_per_node: 0, ..submission() }, "--processes-per-node 0: there is at least 1"),
            (Submission { time: Some("1 day\n#SBATCH --x".into()), ..submission() }, "--time 1 day"),
            (Submission { args: Vec::new(), ..submission() }, "there is nothing to run"),
        ] {
            for e in [change.slurm().unwrap_err(), change.kubernetes().unwrap_err()] {
                assert!(e.message.starts_with(message) && e.hint.is_some(), "{e}");
            }
        }
        let e = Submission { image: None, ..submission() }.kubernetes().unwrap_err();
        assert!(e.message.starts_with("an image is missing"));
        assert!(Submission { processes_per_node: 2, ..submission() }.kubernetes().is_err());
    }
}
