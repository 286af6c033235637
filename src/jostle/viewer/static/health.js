export class HealthView { constructor(){ this.element=document.createElement("div"); } update(){} }
