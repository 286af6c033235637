export class CompareView { constructor(){ this.element=document.createElement("div"); } update(){} }
