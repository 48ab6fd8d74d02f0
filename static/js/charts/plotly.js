/* Plotly (megabytes) is loaded when a page draws its first chart.
     await loadPlotly();  Plotly.react(…) */
export let Plotly = null;
let loading = null;

export function loadPlotly() {
  loading ||= new Promise((resolve, reject) => {
    const script = document.createElement("script");
    script.src = document.documentElement.dataset.plotly;
    script.addEventListener("load", () => {
      Plotly = window.Plotly;
      resolve();
    });
    script.addEventListener("error", () => {
      loading = null;
      script.remove();
      reject(new TypeError("Plotly could not be loaded"));
    });
    document.head.append(script);
  });
  return loading;
}
